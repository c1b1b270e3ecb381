// When a stream passed an event, on the host's clock.
//
// A GPU says how long after one event another one passed. Which moment of the host that was is known
// from anchors: events of which the host has seen, a little late, that they had passed. Of recent
// anchors the least late one counts, those of long ago with what clocks may drift since.
#pragma once

#include <deque>
#include <mutex>
#include <optional>
#include <string>

#include "core/work.h"
#include "gpu/cuda_events.h"

namespace adaptra {

class Device;

class DeviceClock {
 public:
  // The host has seen at `seen` that `event` had passed.
  void stamp(Device& device, EventRef event, Nanoseconds seen);

  struct Moment {
    int64_t at;    // nanoseconds of the host
    double early;  // seconds that it may be too early, for clocks drift
  };
  // When `event` passed; it had at `seen`. Nothing while there is no anchor before it. Of two events
  // the later one never has the earlier moment.
  std::optional<Moment> host(Device& device, const EventRef& event, Nanoseconds seen);

  size_t anchors() const;  // that were ever stamped, since `clear`
  void clear();

 private:
  struct Anchor {
    EventRef event;
    double time;     // of the device, seconds since the first anchor
    double seen;     // of the host, seconds since the same
    double offset;   // from the device's time to the host's, for what follows
    double least;    // what follows is not earlier, on the host
  };
  mutable std::mutex mutex_;
  std::deque<Anchor> anchors_;
  size_t stamped_ = 0;
  Nanoseconds origin_ = 0;
  bool begun_ = true;  // the first one is still here: what was before it is of the same moments
};

// A moment of a stream, which is read later.
class Mark {
 public:
  // Throws CudaError. Where the stream is being captured into a graph the mark is never read.
  Mark(std::shared_ptr<Device> device, cuda::Stream stream);

  // Seconds on the host's clock; nothing while the stream has not come there, or for ever, and then
  // `fault` says why. Never waits.
  std::optional<double> at();
  std::string fault() const { return fault_; }
  double recorded() const { return recorded_; }

 private:
  const std::shared_ptr<Device> device_;
  double recorded_;
  EventRef event_;  // until it is read
  std::optional<double> at_;
  std::string fault_;
};

}  // namespace adaptra
