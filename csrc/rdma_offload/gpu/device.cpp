#include "gpu/device.h"

#include <pthread.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <map>

namespace adaptra {

namespace {

constexpr int kHighest = -1000;  // of priorities: the driver takes the highest there is
// Between two looks at events: at first what a copy of a small message takes, later less than a
// hundredth of what a slow link does.
constexpr std::chrono::microseconds kShortest{20}, kLongest{200};
constexpr double kLastCall = 5;  // seconds for the driver to return from a call
constexpr unsigned long kSlack = 1000;  // nanoseconds that the kernel may add to a pause

std::mutex g_opening;
std::map<int, std::shared_ptr<Device>>& devices() {
  static auto* all = new std::map<int, std::shared_ptr<Device>>;  // the driver may be gone at exit
  return *all;
}

thread_local Use t_use = Use::Others;
thread_local uint64_t t_entered = 0;  // number of the device whose context this thread has
std::atomic<uint64_t> g_opened{0};
// This process, also after a fork: to ask the kernel takes as long as a call into the driver.
std::atomic<pid_t> g_process{getpid()};
const int g_forks = pthread_atfork(nullptr, nullptr, [] { g_process = getpid(); });

std::string advice(cuda::Result code) {
  switch (code) {
    case cuda::kOutOfMemory:
      return "free memory of the GPU or of the host (`ulimit -l` should say unlimited)";
    case cuda::kNotInitialized:
    case cuda::kDeinitialized:
      return "a forked child and a process that ends have no CUDA";
    default:
      return "what failed may be a kernel before it: CUDA_LAUNCH_BLOCKING=1 finds it";
  }
}

}  // namespace

CudaError::CudaError(const char* call, cuda::Result code, const std::string& what)
    : std::runtime_error(std::string(call) + " failed: " + what), code(code) {}

Device::For::For(Use use) : before_(t_use) { t_use = use; }
Device::For::~For() { t_use = before_; }

Device::BesideCaptures::BesideCaptures(const Device& device)
    : cuda_(device.cuda),
      changed_(cuda_.capture_mode != nullptr && cuda_.capture_mode(&mode_) == cuda::kSuccess) {}

Device::BesideCaptures::~BesideCaptures() {
  if (changed_) cuda_.capture_mode(&mode_);
}

std::shared_ptr<Device> Device::open(int ordinal) {
  if (cuda_library() == nullptr) throw std::runtime_error(cuda_missing());
  std::lock_guard<std::mutex> lock(g_opening);
  auto& known = devices()[ordinal];
  if (!known || known->process_ != g_process) {
    auto device = std::shared_ptr<Device>(new Device(ordinal));
    if (known) new std::shared_ptr<Device>(known);  // of a parent process: left alone
    known = device;
    device->soon([device = device.get()] {  // the first anchor
      For others(Use::Others);
      auto event = device->record(device->streams_[kIn], true);
      device->watch(kMoments, event, [device, event](const std::string& error) {
        if (error.empty()) device->clock.stamp(*device, event, now());
      });
    });
  }
  return known;
}

Device::Device(int ordinal)
    : cuda(*cuda_library()), ordinal(ordinal), process_(g_process), number_(++g_opened) {
  timed_ = std::make_shared<EventPool>(cuda, cuda::kEventTiming);
  plain_ = std::make_shared<EventPool>(cuda, cuda::kEventNoTiming);
  int devices = 0;
  check(cuda.device_count(&devices), "cuDeviceGetCount");
  if (ordinal < 0 || ordinal >= devices) {
    throw std::runtime_error("there is no GPU " + std::to_string(ordinal) + ", but " +
                             std::to_string(devices) + " from 0 on");
  }
  check(cuda.device_get(&device_, ordinal), "cuDeviceGet");
  check(cuda.context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
  cuda::Context before = nullptr;
  cuda.context_get(&before);
  try {
    check(cuda.context_set(context_), "cuCtxSetCurrent");
    for (auto& stream : streams_) {
      check(cuda.stream_create(&stream, cuda::kStreamNonBlocking, kHighest),
            "cuStreamCreateWithPriority");
    }
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    for (auto& stream : streams_) {
      if (stream != nullptr) cuda.stream_destroy(stream);
    }
    cuda.context_set(before);
    cuda.context_release(device_);
    throw;
  }
  cuda.context_set(before != nullptr ? before : context_);
}

Device::~Device() { close(0); }

std::string Device::close(double seconds) {
  if (g_process != process_) return "";
  std::lock_guard<std::mutex> closing(closing_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) return "";
    stopping_ = true;
    until_ = now() + static_cast<Nanoseconds>(std::min(seconds, 1e6) * 1e9);
    changed_.notify_all();
  }
  const double last = seconds + kLastCall;
  const std::string hangs = "the driver of GPU " + std::to_string(ordinal) +
                            " has not returned from a call after " + std::to_string(last) +
                            " s; nothing of it is freed";
  if (std::unique_lock<std::mutex> lock(mutex_);
      !ended_.wait_for(lock, patience(last), [this] { return stopped_; })) {
    stopped_ = true;  // it takes no more jobs, if it ever comes back
    closed_ = true;
    thread_.detach();
    return hangs;
  }
  thread_.join();
  if (!blocking_calls_.close(last)) {
    closed_ = true;
    return hangs;
  }
  std::string left;
  size_t count = 0;
  for (auto& queue : watched_) count += queue.size();
  if (count > 0) {
    left = "GPU " + std::to_string(ordinal) + " has not ended " + std::to_string(count) +
           " copies or events after " + std::to_string(seconds) + " s; their memory is not freed";
    // What the GPU may still write to stays for ever.
    for (auto& queue : watched_) new std::deque<Watched>(std::move(queue));
  }
  clock.clear();
  enter();
  closed_ = true;
  timed_->close();
  plain_->close();
  for (auto& stream : streams_) cuda.stream_destroy(stream);
  cuda.context_release(device_);
  t_entered = 0;
  std::lock_guard<std::mutex> lock(g_opening);
  auto known = devices().find(ordinal);
  if (known != devices().end() && known->second.get() == this) devices().erase(known);
  return left;
}

std::string Device::pci() const {
  char id[32] = {};
  check(cuda.pci_bus_id(id, sizeof id, device_), "cuDeviceGetPCIBusId");
  return id;
}

void Device::check(cuda::Result result, const char* call) const {
  if (result == cuda::kSuccess) return;
  throw CudaError(call, result, cuda_words(result) + " on GPU " + std::to_string(ordinal) + "; " +
                                    advice(result));
}

void Device::count() const { ++calls_[static_cast<size_t>(t_use)]; }

// A stream of nullptr is that of the thread's context.
void Device::enter() const {
  if (closed_) throw CudaError("a call", cuda::kDeinitialized, "this side has closed the GPU");
  if (g_process != process_) {
    throw CudaError("a call", cuda::kNotInitialized,
                    "this GPU is of process " + std::to_string(process_) + ", and " +
                        std::to_string(g_process) + " is a child of it; " +
                        advice(cuda::kNotInitialized));
  }
  if (t_entered == number_) return;
  cuda::Context context = nullptr;
  cuda.context_get(&context);
  if (context != context_) check(cuda.context_set(context_), "cuCtxSetCurrent");
  t_entered = number_;
}

EventRef Device::record(cuda::Stream stream, bool timed) {
  enter();
  cuda::Result why = cuda::kSuccess;
  auto event = (timed ? timed_ : plain_)->take(&why);
  check(why, "cuEventCreate");
  count();
  check(cuda.event_record(event.get(), stream), "cuEventRecord");
  return event;
}

void Device::wait(cuda::Stream stream, const EventRef& event) {
  enter();
  count();
  check(cuda.stream_wait(stream, event.get(), 0), "cuStreamWaitEvent");
}

bool Device::passed(const EventRef& event) {
  enter();
  count();
  const auto result = cuda.event_query(event.get());
  if (result == cuda::kNotReady) return false;
  check(result, "cuEventQuery");
  return true;
}

double Device::elapsed(const EventRef& begin, const EventRef& end) {
  enter();
  count();
  float milliseconds = 0;
  check(cuda.event_elapsed(&milliseconds, begin.get(), end.get()), "cuEventElapsedTime");
  return milliseconds * 1e-3;
}

bool Device::capturing(cuda::Stream stream) {
  enter();
  count();
  int status = cuda::kCaptureNone;
  const auto result = cuda.stream_capturing(stream, &status);
  if (result == cuda::kCaptureImplicit) return true;
  check(result, "cuStreamIsCapturing");
  return status != cuda::kCaptureNone;
}

void Device::anchor(cuda::Stream stream) {
  For marks(Use::Marks);
  if (capturing(stream)) return;
  auto event = record(stream, true);
  soon([this, event] {
    watch(kMoments, event, [this, event](const std::string& error) {
      For marks(Use::Marks);
      if (error.empty()) clock.stamp(*this, event, now());
    });
  });
}

bool Device::soon(std::function<void()> job) {
  if (g_process != process_) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  if (stopped_) return false;
  jobs_.push_back(std::move(job));
  changed_.notify_all();
  return true;
}

bool Device::slowly(std::function<void()> job) {
  if (g_process != process_) return false;
  return blocking_calls_.add([this, job = std::move(job)] { guarded(job); });
}

void Device::watch(CopyStream on, EventRef event, Then then) {
  watched_[on].push_back({std::move(event), std::move(then)});
}

// No caller waits for what fails here, and messages report their own failures.
void Device::guarded(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    fault_ = error.what();
  }
}

std::string Device::fault() {
  std::lock_guard<std::mutex> lock(mutex_);
  return fault_;
}

bool Device::watching() const {
  return std::any_of(std::begin(watched_), std::end(watched_),
                     [](const auto& queue) { return !queue.empty(); });
}

// Whether an event has passed. Events of a queue pass in order, so the first one is enough.
bool Device::poll() {
  bool moved = false;
  for (auto& queue : watched_) {
    while (!queue.empty()) {
      std::string error;
      try {
        if (!passed(queue.front().event)) break;
      } catch (const CudaError& failed) {
        error = failed.what();
      }
      const Watched first = std::move(queue.front());
      queue.pop_front();
      guarded([&] { first.then(error); });
      moved = true;
    }
  }
  return moved;
}

void Device::begins(const char* name) {
  pthread_setname_np(pthread_self(), name);
  cuda.context_set(context_);
  t_entered = number_;
  // What it calls is not to end a capture of another thread.
  int mode = cuda::kCaptureRelaxed;
  if (cuda.capture_mode != nullptr) cuda.capture_mode(&mode);
}

void Device::run() {
  begins("adaptra-device");
  prctl(PR_SET_TIMERSLACK, kSlack);
  For messages(Use::Messages);
  auto pause = kShortest;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    std::deque<std::function<void()>> jobs;
    jobs.swap(jobs_);
    lock.unlock();
    for (auto& job : jobs) guarded(job);
    const bool moved = poll();
    const bool worked = moved || !jobs.empty(), more = watching();
    jobs.clear();
    lock.lock();
    if (!jobs_.empty()) continue;
    if (stopping_ && (!more || now() >= until_)) break;
    if (!more) {
      changed_.wait(lock);
      pause = kShortest;
    } else {
      pause = worked ? kShortest : std::min(2 * pause, kLongest);
      changed_.wait_for(lock, pause);
    }
  }
  stopped_ = true;
  ended_.notify_all();
}

}  // namespace adaptra
