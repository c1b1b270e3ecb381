// One way to a peer: a connection, a device, or memory that both have.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/wire.h"
#include "core/work.h"

namespace adaptra {

class Path;

constexpr int kTrial = 100;  // is added to the order of a path on trial

// Who a path serves. A path calls it from its own thread, and never from within `send`.
class Sink {
 public:
  virtual ~Sink() = default;

  // Have `write` put the payload of a frame, from its byte `done` on, to where it belongs, and return
  // what that returns. nullptr stands for nowhere: no receive wants it. The place is good for this call
  // only: a receive may be given up at any time, and its memory freed.
  virtual ssize_t fill(const Header& header, uint64_t done,
                       const std::function<ssize_t(uint8_t*)>& write) = 0;

  // A frame is there with all its payload. False: it cannot be, and the path has to fail.
  virtual bool arrived(Path& path, const Header& header) = 0;

  // The path takes frames again, after it did not.
  virtual void roomy(Path& path) = 0;

  // Nothing moves over the path any more.
  virtual void failed(Path& path, const std::string& why) = 0;
};

class Path {
 public:
  Path(int order, uint64_t longest_piece) : order(order), longest_piece(longest_piece) {}
  virtual ~Path() = default;

  // Whether it takes a frame now; if not, Sink::roomy follows.
  virtual bool takes() const = 0;

  // Bytes that it was given and that have not left.
  virtual uint64_t waiting() const = 0;

  // In how many nanoseconds `bytes` that it was given now would be there, by what it has carried; 0:
  // that is not known. And a guess, of a path that is not used while one of a lower order is well.
  virtual Nanoseconds due(uint64_t) const { return 0; }
  virtual Nanoseconds guess(uint64_t) const { return 0; }

  // Send a frame. `payload` stays where it is for as long as `keep` lives. What has none may wait
  // for the next frame, or for `flush`.
  virtual void send(const Header& header, const uint8_t* payload, std::shared_ptr<void> keep) = 0;
  virtual void flush() {}

  virtual void close() = 0;

  // Close it, and report to the sink; on the path's own thread.
  virtual void fail(const std::string& why) = 0;

  // Whether a peer that is gone shows only by its silence; else the connection's end shows it.
  virtual bool silent() const { return true; }

  std::atomic<int> order;        // paths of the lowest order that work are used, unless they are slow
  const uint64_t longest_piece;  // bytes
  int id = 0;                    // of the engine's
  std::atomic<Nanoseconds> last_received{now()};  // when a frame came
  std::atomic<Nanoseconds> last_sent{now()};      // and when one was sent

  // Numbers of probes, under the peer's lock: sent over it, answered, and to be answered here.
  uint64_t probed = 0, answered = 0, owed = 0;
};

}  // namespace adaptra
