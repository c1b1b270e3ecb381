#include "trace.hpp"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <string>
#include <sys/prctl.h>
#include <unistd.h>
#include <unordered_map>

#include "options.hpp"

extern "C" void fakeCudaMark(const char* text);

namespace fake_cuda {
namespace {

struct Trace {
  std::mutex mutex;
  std::string lines;
  std::unordered_map<std::string, std::string> kernels;  // mangled name -> its number in hex
  int file = -1, threads = 0;
};

Trace* open_trace() {
  if (options().trace.empty()) return nullptr;
  auto* t = new Trace;
  const char* rank = getenv("RANK");
  const std::string base = options().trace + (rank ? "/rank-" + std::string(rank) : "/process-" + std::to_string(getpid()));
  for (int i = 0; t->file < 0 && i < 100; i++)
    t->file = open((base + (i ? "." + std::to_string(i) : "") + ".trace").c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (t->file < 0) {
    say("FAKE_CUDA_TRACE: cannot write %s.trace", base.c_str());
    abort();
  }
  return t;
}

PerProcess<Trace>& trace_of_process() {
  static PerProcess<Trace> found(open_trace);
  return found;
}

Trace* the_trace() { return trace_of_process().get(); }

void write_out(Trace& t) {  // locked
  for (size_t at = 0; at < t.lines.size();) {
    const ssize_t size = write(t.file, t.lines.data() + at, t.lines.size() - at);
    if (size <= 0) break;
    at += (size_t)size;
  }
  t.lines.clear();
}

void add(const char* call, long long stream, long long bytes, const char* more) {
  Trace* t = the_trace();
  if (!t) return;
  static thread_local int thread = -1;
  std::lock_guard<std::mutex> lock(t->mutex);
  char line[512];
  if (thread < 0) {
    thread = t->threads++;
    char name[17] = "";
    prctl(PR_GET_NAME, name);
    snprintf(line, sizeof line, "# thread %d %s\n", thread, name);
    t->lines += line;
  }
  const std::string on = stream < 0 ? "-" : std::to_string(stream), size = bytes < 0 ? "-" : std::to_string(bytes);
  snprintf(line, sizeof line, "%d\t%s\t%s\t%s\t%s\n", thread, call, on.c_str(), size.c_str(), more);
  t->lines += line;
  if (t->lines.size() > 1 << 16) write_out(*t);
}

struct AtExit {
  ~AtExit() { flush_trace(); }
} at_exit;

}  // namespace

void trace(const char* call, long long stream, long long bytes, const char* more) { add(call, stream, bytes, more); }

void trace_kernel(const char* call, long long stream, const char* mangled, unsigned blocks, unsigned threads) {
  Trace* t = the_trace();
  if (!t) return add(call, stream, none, "");
  std::string number;
  {
    std::lock_guard<std::mutex> lock(t->mutex);
    std::string& found = t->kernels[mangled];
    if (found.empty()) {
      char hex[24];
      uint64_t hash = 1469598103934665603u;  // FNV-1a: the same in each process
      for (const char* c = mangled; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211u;
      snprintf(hex, sizeof hex, "%016llx", (unsigned long long)hash);
      found = hex;
      t->lines += "# kernel " + found + " " + mangled + "\n";
    }
    number = found;
  }
  const std::string more = number + " " + std::to_string(blocks) + "x" + std::to_string(threads);
  add(call, stream, none, more.c_str());
}

void flush_trace() {
  Trace* t = trace_of_process().if_made();
  if (!t) return;
  std::lock_guard<std::mutex> lock(t->mutex);
  write_out(*t);
}

}  // namespace fake_cuda

// For programs of the tests: a line of their own in the trace, as where an iteration begins.
extern "C" void fakeCudaMark(const char* text) {
  fake_cuda::add("mark", fake_cuda::none, fake_cuda::none, text);
}
