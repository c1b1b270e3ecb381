// A CUDA driver for tests of one thing at a time: streams are threads that work in order, memory of
// the device is the host's, and a test says when a stream goes on, which call fails, and what the
// device's clock shows. (tests/support/fakes has one that serves a whole training.)
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

using Lock = std::unique_lock<std::mutex>;
// Threads of streams wait here also while the process ends.
std::mutex& g_mutex = *new std::mutex;
std::condition_variable& g_changed = *new std::condition_variable;
double g_offset = 1e6, g_rate = 1;  // of the device's clock
double g_copy = 0;  // seconds that each copy takes
double g_late = 0;  // seconds by which half of all that is on a stream begins late, at most
std::minstd_rand g_random;
struct Stop {  // copies that stand still
  int after;   // so many of them that do not
  long* gate;  // for which all later ones wait
};
std::vector<Stop> g_stops[2];  // of copies to the host, to the device; the last one holds
long* g_pins = nullptr;  // where memory is not pinned for now
int g_unpinnable = 0;    // what pinning fails with
int g_version = 13000, g_devices = 4, g_sticky = 0;
std::map<std::string, std::pair<int, int>> g_failing;  // by call: after how many, with which code
std::map<std::string, long> g_calls;
std::map<void*, size_t> g_pinned;
long g_events = 0, g_contexts = 0;
thread_local void* t_context = nullptr;

double clock_of_device() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count() * g_rate + g_offset;
}

struct Event {
  uint64_t recorded = 0, passed = 0;
  bool timed = true;
  double time = 0;
};

struct Stream {
  std::deque<std::function<void()>> work;
  bool ending = false, capturing = false;
  std::thread thread{[this] { run(); }};

  void run() {
    Lock lock(g_mutex);
    for (;;) {
      g_changed.wait(lock, [this] { return ending || !work.empty(); });
      if (work.empty()) return;
      auto next = std::move(work.front());
      work.pop_front();
      const double late = g_random() % 2 * g_late * (g_random() % 1000) / 1000;
      lock.unlock();
      if (late > 0) std::this_thread::sleep_for(std::chrono::duration<double>(late));
      next();
      lock.lock();
      g_changed.notify_all();
    }
  }
};

std::set<Stream*> g_streams;
// Work that is queued may name what is gone: it stays.
auto& g_kept = *new std::deque<const void*>;
Stream* g_default = nullptr;

Stream* of(void* stream) {
  if (stream != nullptr) return static_cast<Stream*>(stream);
  if (g_default == nullptr) g_default = new Stream;  // for ever
  return g_default;
}

void push(void* stream, std::function<void()> work) {
  of(stream)->work.push_back(std::move(work));
  g_changed.notify_all();
}

// A copy, when it may begin.
void push_copy(int in, void* stream, void* to, const void* from, size_t bytes) {
  long* gate = nullptr;
  for (auto& stop : g_stops[in]) {
    if (stop.after-- <= 0) gate = stop.gate;
  }
  push(stream, [=, takes = g_copy] {
    if (gate != nullptr) {
      Lock lock(g_mutex);
      g_changed.wait(lock, [gate] { return *gate != 0; });
    }
    std::this_thread::sleep_for(std::chrono::duration<double>(takes));
    std::memcpy(to, from, bytes);
  });
}

// A call that copies from or to other memory of the host returns when that is over.
bool is_pinned(const void* at) {
  auto block = g_pinned.upper_bound(const_cast<void*>(at));
  if (block == g_pinned.begin()) return false;
  --block;
  return at < static_cast<const char*>(block->first) + block->second;
}

void finish(void* stream, Lock& lock) {
  auto over = std::make_shared<bool>(false);
  push(stream, [over] { Lock lock(g_mutex); *over = true; });
  g_changed.wait(lock, [&] { return *over; });
}

// Whether this call fails.
int called(const char* name) {
  ++g_calls[name];
  auto failing = g_failing.find(name);
  if (failing != g_failing.end() && failing->second.first-- == 0) {
    const int code = failing->second.second;
    g_failing.erase(failing);
    if (code == 700) g_sticky = code;
    return code;
  }
  return g_sticky;
}

}  // namespace

#define CALL(name)                              \
  Lock lock(g_mutex);                           \
  if (const int error = called(#name)) return error

extern "C" {

int cuInit(unsigned) { CALL(cuInit); return 0; }
int cuDriverGetVersion(int* version) { *version = g_version; return 0; }
int cuGetErrorName(int error, const char** name) {
  *name = error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OTHER";
  return 0;
}
int cuGetErrorString(int error, const char** text) {
  *text = error == 700 ? "an illegal memory access was encountered" : "some error";
  return 0;
}
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetCount(int* count) { *count = g_devices; return 0; }
int cuDeviceGetPCIBusId(char* id, int bytes, int device) {
  std::snprintf(id, bytes, "00000000:%02X:00.0", 0x1a + device);
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  CALL(cuDevicePrimaryCtxRetain);
  *context = reinterpret_cast<void*>(intptr_t{device + 1});
  ++g_contexts;
  return 0;
}
int cuDevicePrimaryCtxRelease_v2(int) { Lock lock(g_mutex); --g_contexts; return 0; }
int cuCtxSetCurrent(void* context) { t_context = context; return 0; }
int cuCtxGetCurrent(void** context) { *context = t_context; return 0; }

int cuStreamCreateWithPriority(void** stream, unsigned flags, int) {
  CALL(cuStreamCreateWithPriority);
  if (flags != 1 || t_context == nullptr) return 1;
  auto* made = new Stream;
  g_streams.insert(made);
  *stream = made;
  return 0;
}
int cuStreamDestroy_v2(void* stream) {
  auto* gone = static_cast<Stream*>(stream);
  {
    Lock lock(g_mutex);
    gone->ending = true;
    g_streams.erase(gone);
    g_changed.notify_all();
  }
  gone->thread.join();
  delete gone;
  return 0;
}
int cuStreamIsCapturing(void* stream, int* status) {
  CALL(cuStreamIsCapturing);
  *status = of(stream)->capturing;
  return 0;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  CALL(cuStreamWaitEvent);
  auto* awaited = static_cast<Event*>(event);
  push(stream, [awaited, until = awaited->recorded] {
    Lock lock(g_mutex);
    g_changed.wait(lock, [&] { return awaited->passed >= until; });
  });
  return 0;
}
int cuEventCreate(void** event, unsigned flags) {
  CALL(cuEventCreate);
  auto* made = new Event;
  made->timed = !(flags & 2);
  *event = made;
  ++g_events;
  return 0;
}
int cuEventDestroy_v2(void* event) {
  Lock lock(g_mutex);
  --g_events;
  g_kept.push_back(event);
  return 0;
}
int cuEventRecord(void* event, void* stream) {
  CALL(cuEventRecord);
  auto* recorded = static_cast<Event*>(event);
  push(stream, [recorded, number = ++recorded->recorded] {
    Lock lock(g_mutex);
    if (number < recorded->passed) return;  // it was recorded again, on a stream that was earlier
    recorded->passed = number;
    recorded->time = clock_of_device();
    g_changed.notify_all();
  });
  return 0;
}
int cuEventQuery(void* event) {
  CALL(cuEventQuery);
  auto* asked = static_cast<Event*>(event);
  return asked->passed == asked->recorded ? 0 : 600;
}
int cuEventElapsedTime(float* milliseconds, void* begin, void* end) {
  CALL(cuEventElapsedTime);
  auto *first = static_cast<Event*>(begin), *last = static_cast<Event*>(end);
  if (!first->timed || !last->timed) return 400;
  if (first->passed != first->recorded || last->passed != last->recorded) return 600;
  *milliseconds = static_cast<float>((last->time - first->time) * 1e3);
  return 0;
}
int cuMemHostAlloc(void** at, size_t bytes, unsigned) {
  CALL(cuMemHostAlloc);
  if (g_unpinnable != 0) return g_unpinnable;
  *at = ::operator new(bytes);
  g_pinned[*at] = bytes;
  return 0;
}
int cuMemFreeHost(void* at) {
  CALL(cuMemFreeHost);
  if (g_pinned.erase(at) == 0) return 1;
  ::operator delete(at);
  return 0;
}
int cuMemHostRegister_v2(void* at, size_t bytes, unsigned) {
  CALL(cuMemHostRegister_v2);
  g_changed.wait(lock, [] { return g_pins == nullptr || *g_pins != 0; });
  if (g_unpinnable != 0) return g_unpinnable;
  return g_pinned.emplace(at, bytes).second ? 0 : 712;
}
int cuMemHostUnregister(void* at) {
  CALL(cuMemHostUnregister);
  return g_pinned.erase(at) == 1 ? 0 : 713;
}
int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t bytes, void* stream) {
  CALL(cuMemcpyDtoHAsync_v2);
  push_copy(0, stream, to, reinterpret_cast<void*>(from), bytes);
  if (!is_pinned(to)) finish(stream, lock);
  return 0;
}
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t bytes, void* stream) {
  CALL(cuMemcpyHtoDAsync_v2);
  push_copy(1, stream, reinterpret_cast<void*>(to), from, bytes);
  if (!is_pinned(from)) finish(stream, lock);
  return 0;
}

// What tests ask for.

void* test_stream(void) {
  Lock lock(g_mutex);
  auto* made = new Stream;  // for ever
  g_kept.push_back(made);
  return made;
}
// From here on the stream stands still, until `test_go` says how far it may go.
void test_stop(void* stream, long* gate) {
  Lock lock(g_mutex);
  push(stream, [gate] {
    Lock lock(g_mutex);
    g_changed.wait(lock, [gate] { return *gate != 0; });
  });
}
// From here on memory is not pinned, until `test_go`: as a driver that waits for the GPU first.
void test_stop_pinning(long* gate) {
  Lock lock(g_mutex);
  g_pins = gate;
}
// From here on no memory is pinned, and such calls fail with `code`; 0: it is again.
void test_unpinnable(int code) {
  Lock lock(g_mutex);
  g_unpinnable = code;
}
// From here on copies `in`, or out, stand still, but for `after` of them, until `test_go`; then for what
// was asked for later.
void test_stop_copies(int in, int after, long* gate) {
  Lock lock(g_mutex);
  g_stops[in].push_back({after, gate});
}
void test_go(long* gate) {
  Lock lock(g_mutex);
  *gate = 1;
  g_changed.notify_all();
}
void test_fill(void* stream, void* at, int value, size_t bytes) {
  Lock lock(g_mutex);
  push(stream, [=] { std::memset(at, value, bytes); });
}
void test_copy(void* stream, void* to, const void* from, size_t bytes) {
  Lock lock(g_mutex);
  push(stream, [=] { std::memcpy(to, from, bytes); });
}
void test_finish(void* stream) {
  Lock lock(g_mutex);
  finish(stream, lock);
}
void test_capture(void* stream, int on) { Lock lock(g_mutex); of(stream)->capturing = on; }
void test_fail(const char* call, int after, int code) {
  Lock lock(g_mutex);
  g_failing[call] = {after, code};
}
void test_heal(void) { Lock lock(g_mutex); g_sticky = 0; g_failing.clear(); }
void test_clock(double offset, double rate) { Lock lock(g_mutex); g_offset = offset; g_rate = rate; }
void test_late(int seed, double seconds) { Lock lock(g_mutex); g_random.seed(seed); g_late = seconds; }
void test_slow_copies(double seconds) { Lock lock(g_mutex); g_copy = seconds; }
void test_version(int version, int devices) { g_version = version; g_devices = devices; }
long test_calls(const char* call) { Lock lock(g_mutex); return g_calls[call]; }
long test_pinned(void) {
  Lock lock(g_mutex);
  long bytes = 0;
  for (auto& [at, size] : g_pinned) bytes += size;
  return bytes;
}
long test_streams(void) { Lock lock(g_mutex); return g_streams.size(); }
long test_events(void) { Lock lock(g_mutex); return g_events; }
long test_contexts(void) { Lock lock(g_mutex); return g_contexts; }

}
