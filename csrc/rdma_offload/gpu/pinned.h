// Memory of the host that a GPU copies to and from by itself: pinned, reused, and given back.
//
// It is the engine's own where the driver can pin that: then what was copied there is sent as it is.
// Else it is the driver's, and the engine copies it once more. Where the driver has none either, what
// is idle is given back first; then memory serves that is not pinned, which costs time.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "core/arena.h"
#include "gpu/device.h"

namespace adaptra {

class Pinned : public std::enable_shared_from_this<Pinned> {
 public:
  // `limit`: bytes; what is idle is given back while there are more.
  Pinned(std::shared_ptr<Device> device, std::shared_ptr<Arena> arena, uint64_t limit);
  ~Pinned();

  // At least `bytes`; comes back by itself when nobody holds it. Throws CudaError where the device is
  // closed. Pinning takes milliseconds and the driver may wait for the GPU meanwhile: not on the
  // device's thread.
  std::shared_ptr<uint8_t> take(uint64_t bytes);

  // Whether the driver copies there by itself. Else a call that copies may wait for all that the GPU
  // has been given.
  bool pinned(const uint8_t* at) const;

  // The same where some is idle; else nothing. On any thread.
  std::shared_ptr<uint8_t> take_idle(uint64_t bytes);

  // Have `count` blocks of `bytes` idle, so that the first messages need not wait for them.
  void prepare(uint64_t bytes, size_t count);

  // The same of pinned ones alone, of which those in use count, too: why the driver pins no more of
  // them, or an empty string. It is asked also after a refusal; as `take`.
  std::string reserve(uint64_t bytes, size_t count);

  // Give back what nobody has used since the last call, or all that is idle; as `take`. What an
  // RDMA device knows stays the engine's until that closes.
  void trim(bool all);

  // Give back all, and what is used when it comes.
  void close();

  struct Bytes {
    uint64_t held = 0, used = 0, peak = 0;  // peak: of held, since `new_peak`
    uint64_t over = 0;                      // held above the limit, at most
  };
  Bytes bytes() const;
  void new_peak();
  void set_limit(uint64_t bytes) { limit_ = bytes; }

  // Why the engine's memory cannot be pinned; empty where it can, or was not tried yet.
  std::string copied() const;

  // Why memory that is not pinned has served; empty where none has.
  std::string unpinned() const;

 private:
  struct Block {
    std::shared_ptr<uint8_t> memory;  // of the arena, or nothing
    uint8_t* at = nullptr;
    uint64_t bytes = 0;
    bool recent = true;  // used since the last trim
    bool pinned = true;
  };
  // Without mutex_, not on the device's thread: the driver may wait for the GPU.
  Block pin(uint64_t bytes, bool last);  // throws where the driver pins none; `last`: any will do
  Block pin_twice(uint64_t bytes);       // the same; idle memory makes room first
  Block pin_or_not(uint64_t bytes);
  void unpin(Block block);
  // On any thread, under locks of the engine, without mutex_.
  void give_back(Block block);
  std::shared_ptr<uint8_t> lend(Block block);       // with mutex_ held
  std::shared_ptr<uint8_t> lend_new(Block block);   // the first time

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Arena> arena_;
  std::atomic<uint64_t> limit_;
  mutable std::mutex mutex_;
  std::multimap<uint64_t, Block> idle_;  // by size
  Bytes bytes_;
  std::string copied_, unpinned_;
  std::set<const uint8_t*> loose_;  // lent, and not pinned
  bool refused_ = false;            // since the last trim: it is not asked again before
  bool closed_ = false;
};

}  // namespace adaptra
