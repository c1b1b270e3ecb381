// What the fake was asked for: variables of the environment, set by tests/support/fakes/cuda/machine.py.
#pragma once
#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>

namespace fake_cuda {

struct Options {
  int devices;            // FAKE_CUDA_DEVICES
  size_t device_bytes;    // memory of one device
  int queues;             // FAKE_CUDA_QUEUES, else CUDA_DEVICE_MAX_CONNECTIONS: hardware queues of a device
  int depth;              // FAKE_CUDA_DEPTH: ops that one hardware queue holds before a launch blocks the host
  double kernel_seconds;  // FAKE_CUDA_KERNEL_US
  double copy_rate;       // FAKE_CUDA_COPY_GBPS: bytes per second each way, of all copies that way together
  bool lazy_loading;      // FAKE_CUDA_LAZY_LOADING: the first launch of a kernel waits for the device
  double stall_seconds;   // FAKE_CUDA_STALL_S: without progress for so long, the process says what waits
  std::string links;      // FAKE_CUDA_LINKS: file of slow links
  std::string trace;      // FAKE_CUDA_TRACE: folder for traces of calls
  std::string unpinnable; // FAKE_CUDA_UNPINNABLE: file with ranks for which no memory can be pinned
};

const Options& options();
std::string rank_name();                                                  // $RANK, else the process
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));  // one line on stderr
double now();                                                             // seconds of CLOCK_MONOTONIC

// Something that a process makes once, and a fork of it (of a zygote of the tests) again: its environment is another.
extern std::atomic<int> forks;

template <class T>
class PerProcess {
 public:
  explicit PerProcess(T* (*make)()) : make_(make) {}

  T* get() {
    if (made_in_ != forks) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (made_in_ != forks) {
        found_ = make_();  // never freed: threads outlive main
        made_in_ = forks.load();
      }
    }
    return found_;
  }

  T* if_made() { return made_in_ == forks ? found_ : nullptr; }

 private:
  T* (*make_)();
  T* found_ = nullptr;
  std::atomic<int> made_in_{-1};
  std::mutex mutex_;
};

}  // namespace fake_cuda
