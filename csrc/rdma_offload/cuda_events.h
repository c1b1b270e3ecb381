// Events of a device, reused: to make one takes longer than to record it.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "cuda_dl.h"

namespace adaptra {

using EventRef = std::shared_ptr<cuda::EventHandle>;  // goes back to its pool

class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  EventPool(const CudaLibrary& cuda, unsigned flags) : cuda_(cuda), flags_(flags) {}

  // nullptr, and why, where the driver gives none.
  EventRef take(cuda::Result* why) {
    cuda::Event event = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!idle_.empty()) {
        event = idle_.back();
        idle_.pop_back();
      }
    }
    if (event == nullptr) {
      *why = cuda_.event_create(&event, flags_);
      if (*why != cuda::kSuccess) return nullptr;
      std::lock_guard<std::mutex> lock(mutex_);
      ++made_;
    }
    return {event, [self = shared_from_this()](cuda::Event event) { self->give_back(event); }};
  }

  // Destroy those that are idle, and from now on each that comes back.
  void close() {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    for (auto event : idle_) cuda_.event_destroy(event);
    made_ -= idle_.size();
    idle_.clear();
  }

  size_t made() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return made_;
  }

 private:
  void give_back(cuda::Event event) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_) return idle_.push_back(event);
    cuda_.event_destroy(event);
    --made_;
  }

  const CudaLibrary& cuda_;
  const unsigned flags_;
  mutable std::mutex mutex_;
  std::vector<cuda::Event> idle_;
  size_t made_ = 0;
  bool closed_ = false;
};

}  // namespace adaptra
