#include "verbs/verbs_addresses.h"

#include <cstring>

namespace adaptra {

namespace {

// How good an address of Ethernet is, what it is, and which better one the port lacks.
struct Worth {
  int value;
  std::string kind, lacks;
};

// Version 2 of RoCE is routed, and an IPv4 address is one that an administrator has given to the
// port.
constexpr int kLeastV2 = 3;  // of the worths of version 2
Worth worth(const std::string& type, const ibv::Gid& gid) {
  const bool v2 = type.find("RoCE v2") != std::string::npos;
  if (is_ipv4(gid.raw)) {
    return v2 ? Worth{5, "RoCE v2, IPv4", ""} : Worth{2, "RoCE v1, IPv4", ": no v2 is there"};
  }
  const bool local = gid.raw[0] == 0xfe && gid.raw[1] == 0x80;
  if (v2 && !local) return {4, "RoCE v2, IPv6", ": no IPv4 is there"};
  if (v2) return {3, "RoCE v2, link-local", ": the port has no other address"};
  return {1, "RoCE v1", ": no v2 is there"};
}

// Why an address was taken, or which one was wanted that the port lacks.
std::string reason(const Worth& one, const VerbsChoice& which, bool inside) {
  const std::string family =
      which.family == 0 ? "" : ", of the family that NCCL_IB_ADDR_FAMILY names";
  if (inside) return one.kind + family + ", within NCCL_IB_ADDR_RANGE";
  if (!which.network.empty()) return one.kind + family + ": none is within NCCL_IB_ADDR_RANGE";
  return one.kind + (which.family == 0 ? one.lacks : family);
}

}  // namespace

VerbsPort addressed(VerbsPort port, int index, const ibv::Gid& gid, std::string why) {
  port.gid_index = index;
  port.gid = {reinterpret_cast<const char*>(gid.raw), sizeof gid.raw};
  port.why = std::move(why);
  return port;
}

bool is_ipv4(const uint8_t* gid) {
  static constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid, kMapped, sizeof kMapped) == 0;
}

bool of_a_site(const uint8_t* gid) { return gid[0] == 0xfe && (gid[1] & 0xc0) == 0xc0; }

uint16_t router_of(const uint8_t* gid) {
  return of_a_site(gid) ? static_cast<uint16_t>(gid[4] << 8 | gid[5]) : uint16_t{0};
}

bool VerbsChoice::has(const ibv::Gid& gid) const {
  if (network.empty()) return false;
  const auto* begin = reinterpret_cast<const uint8_t*>(network.data());
  if (is_ipv4(begin) != is_ipv4(gid.raw)) return false;
  const int bytes = bits / 8, rest = bits % 8;
  return std::memcmp(begin, gid.raw, bytes) == 0 &&
         (rest == 0 || (begin[bytes] ^ gid.raw[bytes]) >> (8 - rest) == 0);
}

void EthernetAddresses::add(int index, const ibv::Gid& gid, const std::string& type) {
  const bool ipv4 = is_ipv4(gid.raw), inside = which_.has(gid);
  if ((which_.family != 0 && which_.family != (ipv4 ? 4 : 6)) || (inside_ && !inside)) return;
  if (inside && !inside_) best_[0] = best_[1] = {};
  inside_ = inside;
  const Worth one = worth(type, gid);
  if (one.value <= best_[ipv4].first) return;
  best_[ipv4] = {one.value, addressed(port_, index, gid, reason(one, which_, inside))};
}

std::vector<VerbsPort> EthernetAddresses::best() const {
  const bool ipv4 = best_[1].first > best_[0].first;
  std::vector<VerbsPort> found;
  for (const auto& [value, one] : {best_[ipv4], best_[!ipv4]}) {
    if (value > 0 && (value >= kLeastV2 || best_[ipv4].first < kLeastV2)) found.push_back(one);
  }
  return found;
}

}  // namespace adaptra
