// Events of a device, reused: to make one takes longer than to record it.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "gpu/cuda_dl.h"

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
      made_.push_back(event);
    }
    return {event, [self = shared_from_this()](cuda::Event event) { self->give_back(event); }};
  }

  // Destroy all; nobody may use one after this.
  void close() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto event : made_) cuda_.event_destroy(event);
    made_.clear();
    idle_.clear();
  }

 private:
  void give_back(cuda::Event event) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!made_.empty()) idle_.push_back(event);
  }

  const CudaLibrary& cuda_;
  const unsigned flags_;
  std::mutex mutex_;
  std::vector<cuda::Event> made_, idle_;
};

}  // namespace adaptra
