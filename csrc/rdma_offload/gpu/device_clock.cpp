#include "gpu/device_clock.h"

#include <algorithm>

#include "gpu/device.h"

namespace adaptra {

namespace {
constexpr size_t kAnchors = 32;    // that are kept: what is older than all of them cannot be read
// Seconds per second, at most, between the clocks: NTP slews the host's by 500e-6, and the device's
// own crystal and what is read of both are not exact.
constexpr double kDrift = 600e-6;
constexpr double kGrain = 5e-6;    // seconds that two readings may differ by
}  // namespace

void DeviceClock::stamp(Device& device, EventRef event, Nanoseconds seen) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (anchors_.empty()) {
    if (origin_ == 0) origin_ = seen;
    anchors_.push_back({std::move(event), 0, (seen - origin_) * kNano, 0, 0});
    anchors_.back().offset = anchors_.back().least = anchors_.back().seen;
    ++stamped_;
    return;
  }
  const Anchor& before = anchors_.back();
  const double since = device.elapsed(before.event, event);
  if (since < 0) return;  // of another stream, which was ahead
  Anchor next{std::move(event), before.time + since, (seen - origin_) * kNano, 0, 0};
  next.offset = next.seen - next.time;
  for (const Anchor& one : anchors_) {
    next.offset = std::min(next.offset,
                           one.seen - one.time + kDrift * (next.time - one.time));
  }
  next.least = std::max(before.least, next.time + before.offset);
  anchors_.push_back(std::move(next));
  ++stamped_;
  if (anchors_.size() <= kAnchors) return;
  anchors_.pop_front();
  begun_ = false;
}

std::optional<DeviceClock::Moment> DeviceClock::host(Device& device, const EventRef& event,
                                                     Nanoseconds seen) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto anchor = anchors_.rbegin(); anchor != anchors_.rend(); ++anchor) {
    const double since = device.elapsed(anchor->event, event);
    const bool first = begun_ && &*anchor == &anchors_.front();
    if (since < 0 && !first) continue;
    const double time = anchor->time + since, latest = (seen - origin_) * kNano;
    // It had passed then; what the clocks may have drifted since the anchor says nothing about that.
    const double drifted = kDrift * std::max(since, 0.0);
    anchor->offset = std::min(anchor->offset, latest - time + drifted);
    double host = std::min(time + anchor->offset, latest);
    if (since >= 0) host = std::min(std::max(host, anchor->least), latest);
    const auto at = static_cast<int64_t>(origin_) + static_cast<int64_t>(host / kNano);
    return Moment{at, kGrain + drifted};
  }
  return {};
}

size_t DeviceClock::anchors() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stamped_;
}

void DeviceClock::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  anchors_.clear();
  stamped_ = 0;
}

Mark::Mark(std::shared_ptr<Device> device, cuda::Stream stream)
    : device_(std::move(device)), recorded_(now() * kNano) {
  Device::For marks(Use::Marks);
  ++device_->marks;
  if (device_->capturing(stream)) {
    fault_ = "the stream is being captured into a graph";
    return;
  }
  event_ = device_->record(stream, true);
}

std::optional<double> Mark::at() {
  if (!event_) return at_;
  Device::For marks(Use::Marks);
  std::optional<DeviceClock::Moment> moment;
  try {
    const Device::BesideCaptures asks(*device_);
    if (!device_->passed(event_)) return {};
    if (device_->clock.anchors() == 0) return {};
    moment = device_->clock.host(*device_, event_, now());
    if (!moment) fault_ = "it is older than every anchor: it was read too late";
  } catch (const CudaError& error) {
    fault_ = error.what();
  }
  event_.reset();
  if (!moment) return {};
  const double at = moment->at * kNano;
  if (at < recorded_ - moment->early) {
    fault_ = "it passed " + std::to_string(recorded_ - at) + " s before it was recorded";
  } else {
    at_ = std::max(at, recorded_);
  }
  return at_;
}

}  // namespace adaptra
