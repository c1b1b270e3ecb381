// Addresses of RDMA ports: what their 16 bytes are, and which ones of a port on Ethernet are taken.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "verbs/verbs_abi.h"

namespace adaptra {

// A port and how it is addressed. `gid`: 16 bytes; `why`: that one was chosen, or why none was.
struct VerbsPort {
  std::string device;
  int port;
  bool active;
  std::string link;  // "Ethernet", "InfiniBand"
  int gid_index;     // -1 for none
  std::string gid;
  std::string why;
  int version = 0;  // of RoCE, 1 or 2; 0: not known, or not on Ethernet
};

// The port with the address at `index`. `type`: for which version of RoCE, as the kernel has it.
VerbsPort addressed(VerbsPort port, int index, const ibv::Gid& gid, const std::string& type,
                    std::string why);

// Of the 16 bytes of a GID. Those of InfiniBand begin with 8 that name the subnet. In one that is local
// to its site (fec0::/10) bytes 6 and 7 do, and bytes 4 and 5 are the address within that subnet by
// which routers reach the port: 0 for none.
bool is_ipv4(const uint8_t* gid);
bool of_a_site(const uint8_t* gid);
uint16_t router_of(const uint8_t* gid);

// Of addresses on Ethernet there are six kinds: of IPv4, of IPv6, and link-local, for version 2 of RoCE
// and, behind these, for version 1. This is the order in which all sides prefer them: version 2 is
// routed, and an IPv4 address is one that an administrator has given to the port.
constexpr int kKinds = 6, kScopes = 3;  // of all, and of one version
enum Scope { kIpv4, kIpv6, kLinkLocal };
Scope scope_of(const uint8_t* gid);

// One address of each kind, 16 bytes; nullptr for none.
using Offer = std::array<const uint8_t*, kKinds>;

// By which two kinds, of `mine` and of `theirs`, two sides find each other. Both have the same result,
// with the two exchanged. Throws std::runtime_error for those that have nothing in common, with what
// both have; `at`: whose the addresses of `mine` are.
std::pair<int, int> agreed(const Offer& mine, const Offer& theirs, const std::string& at);

// Which addresses of Ethernet may be taken where no index is named: those of `family`, 4 or 6, and for
// `version` 1 or 2 of RoCE, 0 for either; of these those that begin with `bits` of the 16 bytes
// `network`, if there are any. An empty `network` is none.
struct VerbsChoice {
  int family = 0, version = 0;
  std::string network;
  int bits = 0;

  // Whether a GID is of the network. One of IPv4 is of none of IPv6, not even of all of it.
  bool has(const ibv::Gid& gid) const;

  // Why a port has none.
  std::string lacking() const;
};

// Of the addresses of a port on Ethernet one of each kind, as far as `which` has no objection.
class EthernetAddresses {
 public:
  EthernetAddresses(VerbsPort port, VerbsChoice which)
      : port_(std::move(port)), which_(std::move(which)) {}

  // What is at `index`, with its `type`; of several of a kind the first one counts.
  void add(int index, const ibv::Gid& gid, const std::string& type);

  // The best one first.
  std::vector<VerbsPort> found() const;

 private:
  std::string reason(int kind) const;  // why one of it was taken, or which one was wanted

  const VerbsPort port_;
  const VerbsChoice which_;
  std::array<VerbsPort, kKinds> of_kind_;  // without a name of the device: none
  bool inside_ = false;                    // some are of the network, so that others do not count
};

}  // namespace adaptra
