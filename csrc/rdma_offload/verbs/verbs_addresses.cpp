#include "verbs/verbs_addresses.h"

#include <arpa/inet.h>

#include <cstring>
#include <stdexcept>

namespace adaptra {

namespace {

const char* const kScopeNames[] = {"IPv4", "IPv6", "link-local"};

int version_of(const std::string& type) {
  return type.empty() ? 0 : type.find("RoCE v2") != std::string::npos ? 2 : 1;
}

int version_of(int kind) { return kind < kScopes ? 2 : 1; }
int family_of(int kind) { return kind % kScopes == kIpv4 ? 4 : 6; }

std::string text_of(const uint8_t* gid) {
  char text[INET6_ADDRSTRLEN] = "";
  if (is_ipv4(gid)) {
    inet_ntop(AF_INET, gid + 12, text, sizeof text);
  } else {
    inet_ntop(AF_INET6, gid, text, sizeof text);
  }
  return text;
}

// The first kind that it has; kKinds for none.
int best_of(const Offer& offer) {
  int kind = 0;
  while (kind < kKinds && offer[kind] == nullptr) ++kind;
  return kind;
}

// Whether there is one kind of each, `what` of which is the same.
bool share(const Offer& mine, const Offer& theirs, int (*what)(int)) {
  for (int one = 0; one < kKinds; ++one) {
    for (int other = 0; other < kKinds; ++other) {
      if (mine[one] != nullptr && theirs[other] != nullptr && what(one) == what(other)) return true;
    }
  }
  return false;
}

// Why these have nothing in common.
std::string apart(const Offer& mine, const Offer& theirs, const std::string& at) {
  const int here = best_of(mine), there = best_of(theirs);
  if (there == kKinds) return "the other side has no address";
  auto words = [&](const std::string& what, auto one, const std::string& variables) {
    return "no address of one " + what + ": " + one(here) + " here, " + one(there) + " there (" +
           text_of(mine[here]) + " at " + at + ", and " + text_of(theirs[there]) + "); one " + what +
           " for both is needed, see " + variables;
  };
  auto version = [](int kind) { return "v" + std::to_string(version_of(kind)); };
  auto family = [](int kind) { return "IPv" + std::to_string(family_of(kind)); };
  if (!share(mine, theirs, version_of)) {
    return words("version of RoCE", version, "NCCL_IB_ROCE_VERSION_NUM");
  }
  if (!share(mine, theirs, family_of)) return words("family", family, "NCCL_IB_ADDR_FAMILY");
  return words("family and version of RoCE",
               [&](int kind) { return family(kind) + " " + version(kind); },
               "NCCL_IB_ADDR_FAMILY and NCCL_IB_ROCE_VERSION_NUM");
}

}  // namespace

VerbsPort addressed(VerbsPort port, int index, const ibv::Gid& gid, const std::string& type,
                    std::string why) {
  port.gid_index = index;
  port.gid = {reinterpret_cast<const char*>(gid.raw), sizeof gid.raw};
  port.why = std::move(why);
  port.version = version_of(type);
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

Scope scope_of(const uint8_t* gid) {
  if (is_ipv4(gid)) return kIpv4;
  return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80 ? kLinkLocal : kIpv6;
}

std::pair<int, int> agreed(const Offer& mine, const Offer& theirs, const std::string& at) {
  for (int kind = 0; kind < kKinds; ++kind) {
    if (mine[kind] != nullptr && theirs[kind] != nullptr) return {kind, kind};
  }
  // An address of the link and one that is not of it alone may still meet, on one link.
  for (int first : {0, kScopes}) {
    for (auto [one, other] : {std::pair(first + kIpv6, first + kLinkLocal),
                              std::pair(first + kLinkLocal, first + kIpv6)}) {
      if (mine[one] != nullptr && theirs[other] != nullptr) return {one, other};
    }
  }
  throw std::runtime_error(apart(mine, theirs, at));
}

bool VerbsChoice::has(const ibv::Gid& gid) const {
  if (network.empty()) return false;
  const auto* begin = reinterpret_cast<const uint8_t*>(network.data());
  if (is_ipv4(begin) != is_ipv4(gid.raw)) return false;
  const int bytes = bits / 8, rest = bits % 8;
  return std::memcmp(begin, gid.raw, bytes) == 0 &&
         (rest == 0 || (begin[bytes] ^ gid.raw[bytes]) >> (8 - rest) == 0);
}

std::string VerbsChoice::lacking() const {
  const std::string of_family = "IPv" + std::to_string(family);
  const std::string of_version = "RoCE v" + std::to_string(version);
  const std::string begin = "it has no GID";
  if (family == 0 && version == 0) return begin + ": give its network interface an address";
  if (version == 0) return begin + " of " + of_family + ", which NCCL_IB_ADDR_FAMILY names";
  if (family == 0) return begin + " of " + of_version + ", which NCCL_IB_ROCE_VERSION_NUM names";
  return begin + " of " + of_family + " and " + of_version +
         ", which NCCL_IB_ADDR_FAMILY and NCCL_IB_ROCE_VERSION_NUM name";
}

void EthernetAddresses::add(int index, const ibv::Gid& gid, const std::string& type) {
  const int version = version_of(type);
  const int kind = (version == 2 ? 0 : kScopes) + scope_of(gid.raw);
  const bool inside = which_.has(gid);
  if ((which_.family != 0 && which_.family != family_of(kind)) ||
      (which_.version != 0 && which_.version != version) || (inside_ && !inside)) {
    return;
  }
  if (inside && !inside_) of_kind_ = {};
  inside_ = inside;
  if (of_kind_[kind].device.empty()) of_kind_[kind] = addressed(port_, index, gid, type, reason(kind));
}

std::string EthernetAddresses::reason(int kind) const {
  static const std::string kLacks[] = {"", ": no IPv4 is there", ": the port has no other address"};
  std::string why = "RoCE v" + std::to_string(version_of(kind)) + ", " + kScopeNames[kind % kScopes];
  if (which_.family != 0) why += ", of the family that NCCL_IB_ADDR_FAMILY names";
  if (which_.version != 0) why += ", of the version that NCCL_IB_ROCE_VERSION_NUM names";
  if (inside_) return why + ", within NCCL_IB_ADDR_RANGE";
  if (!which_.network.empty()) return why + ": none is within NCCL_IB_ADDR_RANGE";
  if (which_.family != 0 || which_.version != 0) return why;
  return why + (version_of(kind) == 2 ? kLacks[kind] : ": no v2 is there");
}

std::vector<VerbsPort> EthernetAddresses::found() const {
  std::vector<VerbsPort> found;
  for (const VerbsPort& one : of_kind_) {
    if (!one.device.empty()) found.push_back(one);
  }
  return found;
}

}  // namespace adaptra
