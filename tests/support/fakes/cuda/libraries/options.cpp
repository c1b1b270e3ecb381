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

double number(const char* name, double otherwise) {
  const std::string value = text(name);
  if (value.empty()) return otherwise;
  char* end = nullptr;
  const double found = strtod(value.c_str(), &end);
  if (*end != 0 || found < 0) {
    fprintf(stderr, "fake CUDA: %s=%s has to be a number from 0 on\n", name, value.c_str());
    abort();
  }
  return found;
}

Options* read() {
  auto* o = new Options;
  o->devices = (int)number("FAKE_CUDA_DEVICES", 8);
  o->device_bytes = (size_t)16384 << 20;
  o->queues = (int)number("FAKE_CUDA_QUEUES", number("CUDA_DEVICE_MAX_CONNECTIONS", 8));
  if (o->queues < 1) o->queues = 1;
  o->depth = (int)number("FAKE_CUDA_DEPTH", 1024);
  o->kernel_seconds = number("FAKE_CUDA_KERNEL_US", 0) * 1e-6;
  o->copy_rate = number("FAKE_CUDA_COPY_GBPS", 20) * 1e9;
  o->lazy_loading = number("FAKE_CUDA_LAZY_LOADING", 0) != 0;
  o->stall_seconds = number("FAKE_CUDA_STALL_S", 10);
  o->links = text("FAKE_CUDA_LINKS");
  o->trace = text("FAKE_CUDA_TRACE");
  o->unpinnable = text("FAKE_CUDA_UNPINNABLE");
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
