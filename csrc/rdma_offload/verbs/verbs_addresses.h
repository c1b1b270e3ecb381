// Addresses of RDMA ports: what their 16 bytes are, and which ones of a port on Ethernet are taken.
#pragma once

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
};

VerbsPort addressed(VerbsPort port, int index, const ibv::Gid& gid, std::string why);

// Of the 16 bytes of a GID. Those of InfiniBand begin with 8 that name the subnet. In one that is local
// to its site (fec0::/10) bytes 6 and 7 do, and bytes 4 and 5 are the address within that subnet by
// which routers reach the port: 0 for none.
bool is_ipv4(const uint8_t* gid);
bool of_a_site(const uint8_t* gid);
uint16_t router_of(const uint8_t* gid);

// Which addresses of Ethernet may be taken where no index is named: those of `family`, 4 or 6, 0 for
// either; of these those that begin with `bits` of the 16 bytes `network`, if there are any. An empty
// `network` is none.
struct VerbsChoice {
  int family = 0;
  std::string network;
  int bits = 0;

  // Whether a GID is of the network. One of IPv4 is of none of IPv6, not even of all of it.
  bool has(const ibv::Gid& gid) const;
};

// Of the addresses of a port on Ethernet the best ones, as far as `which` has no objection.
class EthernetAddresses {
 public:
  EthernetAddresses(VerbsPort port, VerbsChoice which)
      : port_(std::move(port)), which_(std::move(which)) {}

  // What is at `index`. `type`: for which version of RoCE, as the kernel has it.
  void add(int index, const ibv::Gid& gid, const std::string& type);

  // The best one of each family, for the newest version of RoCE that the port has; the best one first.
  std::vector<VerbsPort> best() const;

 private:
  const VerbsPort port_;
  const VerbsChoice which_;
  std::pair<int, VerbsPort> best_[2];  // with what each is worth: of IPv6, of IPv4
  bool inside_ = false;                // some are of the network, so that others do not count
};

}  // namespace adaptra
