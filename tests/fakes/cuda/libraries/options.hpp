// What the fake was asked for: variables of the environment, set by tests/fakes/cuda/machine.py.
#pragma once
#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>

namespace fake_cuda {

struct Options {
  int devices;            // FAKE_CUDA_DEVICES
  size_t device_bytes;    // FAKE_CUDA_MIB: memory of one device
  int queues;             // FAKE_CUDA_QUEUES, else CUDA_DEVICE_MAX_CONNECTIONS: hardware queues of a device
  int depth;              // FAKE_CUDA_DEPTH: ops that one hardware queue holds before a launch blocks the host
  double kernel_seconds;  // FAKE_CUDA_KERNEL_US
  double gemm_seconds;    // FAKE_CUDA_GEMM_US: of cuBLAS; else as other kernels
  double to_host_rate;    // FAKE_CUDA_TO_HOST_GBPS, else FAKE_CUDA_COPY_GBPS: bytes per second, of all copies together
  double to_device_rate;  // FAKE_CUDA_TO_DEVICE_GBPS, the same the other way
  double pin_rate;        // FAKE_CUDA_PIN_GBPS: bytes per second that are pinned, on the thread that asks; 0: at once
  double payload;         // FAKE_CUDA_PAYLOAD: how many bytes one stands for in what copies and links take
  double clock_ppm;       // FAKE_CUDA_CLOCK_PPM: how much faster the devices' clock is than the host's
  bool free_waits;        // FAKE_CUDA_FREE_WAITS: whether freeing memory waits for the device
  bool lazy_loading;      // FAKE_CUDA_LAZY_LOADING: the first launch of a kernel waits for the device
  bool nccl_holds;        // FAKE_CUDA_NCCL_HOLDS: a kernel of NCCL keeps its hardware queue until it ends
  bool nccl_lazy;         // FAKE_CUDA_NCCL_LAZY: NCCL connects at first use, and blocks the host for it
  size_t nccl_eager;      // FAKE_CUDA_NCCL_EAGER: bytes of the largest send that is over without its receive
  double nccl_seconds;    // FAKE_CUDA_NCCL_INIT_S: how long ranks may wait for each other's sockets
  double stall_seconds;   // FAKE_CUDA_STALL_S: without progress for so long, the process says what waits
  std::string links;      // FAKE_CUDA_LINKS: file of slow links
  std::string trace;      // FAKE_CUDA_TRACE: folder for traces of calls
  std::string unpinnable; // FAKE_CUDA_UNPINNABLE: file with ranks for which no memory can be pinned
  std::string accounts;   // FAKE_CUDA_ACCOUNTS: folder for counters that others read while it runs
  bool verbose;           // FAKE_CUDA_VERBOSE
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
