#include "options.hpp"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <pthread.h>
#include <string>
#include <unistd.h>

namespace fake_cuda {
namespace {

std::string text(const char* name) {
  const char* value = getenv(name);
  return value ? value : "";
}

double number(const char* name, double otherwise, double least = 0) {
  const std::string value = text(name);
  if (value.empty()) return otherwise;
  char* end = nullptr;
  const double found = strtod(value.c_str(), &end);
  if (*end != 0 || found < least) {
    fprintf(stderr, "fake CUDA: %s=%s has to be a number from %g on\n", name, value.c_str(), least);
    abort();
  }
  return found;
}

Options* read() {
  auto* o = new Options;
  o->devices = (int)number("FAKE_CUDA_DEVICES", 8);
  o->device_bytes = (size_t)number("FAKE_CUDA_MIB", 16384) << 20;
  o->queues = (int)number("FAKE_CUDA_QUEUES", number("CUDA_DEVICE_MAX_CONNECTIONS", 8));
  if (o->queues < 1) o->queues = 1;
  o->depth = (int)number("FAKE_CUDA_DEPTH", 1024);
  o->kernel_seconds = number("FAKE_CUDA_KERNEL_US", 0) * 1e-6;
  o->gemm_seconds = number("FAKE_CUDA_GEMM_US", o->kernel_seconds * 1e6) * 1e-6;
  const double both_ways = number("FAKE_CUDA_COPY_GBPS", 20);
  o->to_host_rate = number("FAKE_CUDA_TO_HOST_GBPS", both_ways) * 1e9;
  o->to_device_rate = number("FAKE_CUDA_TO_DEVICE_GBPS", both_ways) * 1e9;
  o->pin_rate = number("FAKE_CUDA_PIN_GBPS", 0) * 1e9;
  o->payload = number("FAKE_CUDA_PAYLOAD", 1);
  o->clock_ppm = number("FAKE_CUDA_CLOCK_PPM", 0, -1e5);
  o->free_waits = number("FAKE_CUDA_FREE_WAITS", 1) != 0;
  o->lazy_loading = number("FAKE_CUDA_LAZY_LOADING", 0) != 0;
  o->nccl_holds = number("FAKE_CUDA_NCCL_HOLDS", 1) != 0;
  o->nccl_eager = (size_t)number("FAKE_CUDA_NCCL_EAGER", 0);
  o->nccl_lazy = number("FAKE_CUDA_NCCL_LAZY", 1) != 0;
  o->nccl_seconds = number("FAKE_CUDA_NCCL_INIT_S", 600);
  o->stall_seconds = number("FAKE_CUDA_STALL_S", 10);
  o->links = text("FAKE_CUDA_LINKS");
  o->trace = text("FAKE_CUDA_TRACE");
  o->unpinnable = text("FAKE_CUDA_UNPINNABLE");
  o->accounts = text("FAKE_CUDA_ACCOUNTS");
  o->verbose = number("FAKE_CUDA_VERBOSE", 0) != 0;
  return o;
}

}  // namespace

std::atomic<int> forks{0};

const Options& options() {
  static PerProcess<Options> found(read);
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forks++; });
  (void)registered;
  return *found.get();
}

std::string rank_name() {
  const std::string rank = text("RANK");
  return rank.empty() ? "process " + std::to_string(getpid()) : "rank " + rank;
}

void say(const char* format, ...) {
  char* words = nullptr;
  va_list given;
  va_start(given, format);
  const int size = vasprintf(&words, format, given);
  va_end(given);
  const std::string line = "fake CUDA, " + rank_name() + ": " + (size < 0 ? format : words) + "\n";
  free(words);
  if (write(2, line.data(), line.size()) < 0) return;  // in one piece, among lines of other processes
}

double now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

}  // namespace fake_cuda
