// A queue pair of type RC, the memory that it works with, and the one at the other side.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "verbs/verbs_device.h"

namespace adaptra {

// How much of everything. `slots`: at first, and `most` in all; `headers`: bytes of registered memory
// for each write; `inlined`: payload that needs none, if the device can.
struct VerbsSizes {
  uint32_t slots, most;
  uint64_t slot;
  uint32_t writes, headers, receives, inlined;
};

// Memory that the other side may write to: `count` slots, one behind the other.
struct VerbsSlots {
  uint64_t address = 0;
  uint32_t key = 0, count = 0;
};

// How the fabric is to carry packets; NCCL's variables of docs/cluster.md.
struct VerbsService {
  uint8_t traffic_class = 0;   // of the global route: the DSCP and ECN bits of RoCE v2
  uint8_t level = 0;           // the service level
  uint16_t partition = 0;      // the place of the partition key in the port's table
  // What is not acknowledged within 4.096 us * 2^timeout goes again, `retries` times at most. With
  // these, 0.27 s and 7 tries, a path fails after two to eight seconds, depending on the device.
  uint8_t timeout = 16, retries = 6;
  uint32_t connections = 1;    // of the port to the same peer: they share its slots
};

class VerbsQp {
 public:
  // Not connected; its receives are posted. `gid`: an index, or -1 for the best address
  // of `which`. Throws std::runtime_error, which says why the device cannot be used.
  VerbsQp(std::shared_ptr<VerbsDevice> device, int port, int gid, const VerbsChoice& which, VerbsService service,
          VerbsSizes sizes);
  ~VerbsQp();
  VerbsQp(const VerbsQp&) = delete;

  // What the other side has to know, and its own: then frames may come. Both sides find the same two
  // addresses, of one family and for one version of RoCE. Throws as above, also where there are
  // none; may take seconds, for the network has to find the way.
  std::string card() const;
  void connect(const std::string& card);

  // "port 1 of mlx5_0"
  std::string name() const;
  bool active() const;  // the port
  int fd() const { return channel_->fd; }

  // Counted from 0, over all that were granted; nullptr: there is none of this number.
  uint8_t* slot(uint32_t number) const;

  // Grant as many slots again as there are, or nothing: there are `most`, or memory cannot be had.
  VerbsSlots grow();

  uint8_t* headers(uint64_t write) const;
  uint32_t headers_key() const { return headers_.registered->lkey; }
  uint32_t inlined() const { return inlined_; }

  int post(ibv::SendWr& wr);  // 0, or an error
  bool post_receive();
  int poll(ibv::Completion* found, int most);

  // Take the event that made `fd` readable, and ask for another one on the next completion.
  void take_event();

  // Nothing is read or written any more.
  void stop();

  // What the other side's card has granted.
  const VerbsSlots& theirs() const { return theirs_; }

  // Call `failed` when the port goes down or something happens to this.
  void watch(VerbsDevice::Failed failed) { device->watch(qp_, port_, std::move(failed)); }
  void unwatch() { device->unwatch(qp_); }

  const std::shared_ptr<VerbsDevice> device;

 private:
  struct Card;
  struct Region {
    VerbsSlots granted;
    uint64_t bytes = 0;
    ibv::Mr* registered = nullptr;
  };
  Region region(uint64_t bytes, int access) const;  // memory that the device reaches; throws
  void grant(uint32_t count);                       // slots, in a region of their own; throws
  void open();     // of the constructor: all that the device has to make; throws
  void destroy();  // what `open` has made so far
  std::array<const VerbsPort*, kKinds> offered() const;  // its addresses
  // An address here and one there by which both find each other; throws where there are none.
  std::pair<const VerbsPort*, const uint8_t*> agreed(const Card& card) const;
  ibv::Address way(const Card& card) const;  // to the other side

  const VerbsLibrary& verbs_;
  const int port_;
  const VerbsService service_;
  const VerbsSizes sizes_;
  const uint32_t psn_;
  const std::vector<VerbsPort> addresses_;
  const ibv::PortAttributes attributes_;
  VerbsSlots theirs_;
  Region headers_;
  std::vector<Region> slots_;  // of the loop's thread alone, once it is connected
  ibv::Channel* channel_ = nullptr;
  ibv::Cq* cq_ = nullptr;
  ibv::Qp* qp_ = nullptr;
  uint32_t inlined_ = 0;
};

}  // namespace adaptra
