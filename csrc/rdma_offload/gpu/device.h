// A GPU as the engine uses it: a stream for each direction of copies, pooled events, and a thread
// that waits for events so that no other thread has to. Nothing that it puts on a stream waits for
// anything but events that are recorded already.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/work.h"
#include "gpu/blocking_calls.h"
#include "gpu/cuda_dl.h"
#include "gpu/device_clock.h"

namespace adaptra {

// A call into the driver that failed: which one, its code, and what to do.
class CudaError : public std::runtime_error {
 public:
  CudaError(const char* call, cuda::Result code, const std::string& what);
  const cuda::Result code;
};

// What calls into the driver are made for; they are counted by it.
enum class Use { Messages, Marks, Others };
constexpr size_t kUses = 3;

class Device : public std::enable_shared_from_this<Device> {
 public:
  // The one of this process; throws std::runtime_error where there is none. `ordinal`: as torch
  // counts devices.
  static std::shared_ptr<Device> open(int ordinal);
  ~Device();

  // End the thread, give everything back. Copies under way have `seconds` to end; what of them has
  // not is left to the driver, and named in what is returned. Later calls throw CudaError.
  std::string close(double seconds);

  std::string pci() const;  // its address on the bus

  // On any thread; they throw CudaError.
  EventRef record(cuda::Stream stream, bool timed);
  void wait(cuda::Stream stream, const EventRef& event);  // nothing later on it runs before that
  bool passed(const EventRef& event);
  double elapsed(const EventRef& begin, const EventRef& end);  // seconds; both have passed
  bool capturing(cuda::Stream stream);  // into a graph
  void check(cuda::Result result, const char* call) const;
  void enter() const;  // this thread calls the driver

  // Tie its clock to the host's here; called once per iteration, or so.
  void anchor(cuda::Stream stream);

  // Run `job` on the device's thread, soon; false once that has ended.
  bool soon(std::function<void()> job);

  // The same on another thread, for calls that may wait for all that the GPU has been given, as to
  // pin memory and to give it back. A collective of the training's may be among that, whose peer
  // waits for a message: the device's thread, which hands messages on, must not wait for it.
  bool slowly(std::function<void()> job);

  // Held while a copy is put on the stream out of the GPU and its job is handed to the thread: the
  // thread sees copies in the order in which they pass.
  std::unique_lock<std::mutex> in_order() { return std::unique_lock<std::mutex>(order_); }

  // kMoments: no copies, but events of the callers' streams that the clock reads.
  enum CopyStream { kOut, kIn, kMoments, kCopyStreams };
  cuda::Stream stream(CopyStream on) const { return streams_[on]; }

  // The device's thread alone: what runs when an event has passed, with why not, if it never will.
  using Then = std::function<void(const std::string& error)>;
  void watch(CopyStream on, EventRef event, Then then);

  // While one of these lives, its thread may ask for events and pin memory though another thread
  // captures a graph: in the driver's default mode that fails, and ends the capture. The mode before
  // comes back.
  class BesideCaptures {
   public:
    explicit BesideCaptures(const Device& device);
    ~BesideCaptures();
    BesideCaptures(const BesideCaptures&) = delete;
    BesideCaptures& operator=(const BesideCaptures&) = delete;

   private:
    const CudaLibrary& cuda_;
    int mode_ = cuda::kCaptureRelaxed;  // then the one before
    bool changed_;
  };

  // Counts the driver calls of a scope.
  class For {
   public:
    explicit For(Use use);
    ~For();

   private:
    const Use before_;
  };
  // What has failed on its thread beside messages, last; empty if nothing has.
  std::string fault();
  uint64_t calls(Use use) const { return calls_[static_cast<size_t>(use)]; }

  const CudaLibrary& cuda;
  const int ordinal;
  DeviceClock clock;
  std::atomic<uint64_t> marks{0};

 private:
  explicit Device(int ordinal);
  void count() const;             // a call into the driver, on any thread
  void begins(const char* name);  // first on each thread of ours: its name and the GPU's context
  void guarded(const std::function<void()>& work);  // on those: what it throws is kept for `fault`

  // On the device's thread, without mutex_.
  void run();             // the thread
  bool poll();            // run what waits for events that have passed; whether any had
  bool watching() const;  // events that have not

  const pid_t process_;
  const uint64_t number_;  // of all that this process has opened
  cuda::Ordinal device_ = 0;
  cuda::Context context_ = nullptr;
  cuda::Stream streams_[2] = {};
  std::shared_ptr<EventPool> timed_, plain_;
  mutable std::array<std::atomic<uint64_t>, kUses> calls_{};

  struct Watched {
    EventRef event;
    Then then;
  };
  std::deque<Watched> watched_[kCopyStreams];  // in the order in which they pass
  std::mutex order_, mutex_;
  std::condition_variable changed_, ended_;
  std::deque<std::function<void()>> jobs_;
  std::string fault_;
  bool stopping_ = false, stopped_ = false;
  Nanoseconds until_ = 0;
  std::atomic<bool> closed_{false};
  std::mutex closing_;
  std::thread thread_;
  BlockingCalls blocking_calls_{[this] { begins("adaptra-pins"); }};
};

}  // namespace adaptra
