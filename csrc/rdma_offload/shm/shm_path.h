// A path between two processes of one machine: headers in a ring, payload in the sender's arena, from
// where the receiver copies it to its place. The only copy.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "core/arena.h"
#include "core/loop.h"
#include "core/owned.h"
#include "core/path.h"

namespace adaptra {

// Descriptors of a path. `socket`: connected to the other process; a byte wakes it, and its end is
// seen. Unlike an event counter, nothing that the other side does can make us wait for it.
// `ring`: memory that both have. `arena`: the other side's memory.
struct ShmEnds {
  Owned socket, ring, arena;
};

class ShmPath : public Path, public std::enable_shared_from_this<ShmPath> {
 public:
  // A descriptor of memory for a ring.
  static int new_ring();

  // `first`: which half of the ring it sends over; the other side has the other one. Throws where a
  // descriptor is not of the kind above.
  ShmPath(ShmEnds ends, bool first, uint64_t piece, std::shared_ptr<Arena> arena, Loop& loop,
          std::weak_ptr<Sink> sink);
  ~ShmPath() override;

  void start();
  bool takes() const override;
  uint64_t waiting() const override;
  void send(const Header& header, const uint8_t* payload, std::shared_ptr<void> keep) override;
  void close() override;
  void fail(const std::string& why) override { end(why); }
  bool silent() const override { return false; }

 private:
  static constexpr uint64_t kSlots = 256, kTurn = 64;
  struct Slot {
    Header header;
    uint64_t at;  // of the payload, in the sender's arena
  };
  struct RingHalf {
    alignas(64) std::atomic<uint64_t> pushed;
    alignas(64) std::atomic<uint64_t> popped;
    alignas(64) std::atomic<uint32_t> reader_sleeps;
    std::atomic<uint32_t> writer_waits;
    std::atomic<uint32_t> closed;  // by the writer: from now on its memory holds something else
    Slot slots[kSlots];
  };
  static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");

  // On the loop's thread, without a lock.
  void ready(uint64_t most = kTurn);  // read at most so many frames, before other paths have their turn
  bool pop(Sink& sink);               // one frame; false: the path has ended
  void end(const std::string& why);   // close, and report to the sink
  void ring();                        // on any thread: wake the other process

  const Owned socket_;
  const std::shared_ptr<Arena> arena_;
  const View view_;
  Loop& loop_;
  std::weak_ptr<Sink> sink_;
  RingHalf* halves_;
  RingHalf& out_;
  RingHalf& in_;
  uint64_t pushed_ = 0;             // ours; what the other side writes is not believed
  uint64_t popped_ = 0;
  std::mutex closing_;
  std::atomic<bool> closed_{false};
};

}  // namespace adaptra
