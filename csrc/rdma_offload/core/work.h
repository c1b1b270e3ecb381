// A send or a receive under way.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace adaptra {

using Nanoseconds = uint64_t;  // of CLOCK_MONOTONIC; 0: has not happened
constexpr double kNano = 1e-9;   // seconds

inline Nanoseconds now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// How long a wait may take; what is longer than the clock can say is cut.
inline std::chrono::duration<double> patience(double seconds) {
  return std::chrono::duration<double>(std::min(seconds, 1e9));
}

// Read at any time, without a lock.
struct Stamps {
  std::atomic<Nanoseconds> sent{0};       // on the sender's clock: isend was called
  std::atomic<Nanoseconds> left{0};       // of a send: its first byte went out
  std::atomic<Nanoseconds> posted{0};     // of a receive
  std::atomic<Nanoseconds> completed{0};  // of a receive: all is there; of a send: the peer says so
};

class Work {
 public:
  // `awaited` is called once, at the first `wait`.
  explicit Work(std::function<void()> awaited = {}) : awaited_(std::move(awaited)) {}

  // Whether it ended within `seconds`.
  bool wait(double seconds) {
    if (over_) return true;
    if (awaited_ && !waited_.exchange(true)) awaited_();
    std::unique_lock<std::mutex> lock(mutex_);
    return ended_.wait_for(lock, patience(seconds), [this] { return over_.load(); });
  }

  bool done() const { return over_; }

  // Why it failed; empty for one that went well, or is not over.
  std::string error() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }

  // Whether it has not ended; then `ended` is called when it does, on the thread that ends it and
  // under locks of that thread: it may only pass the event on.
  bool then(std::function<void()> ended) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (over_) return false;
    then_ = std::move(ended);
    return true;
  }

  // The first end stays. An empty `error`: it went well.
  void end(const std::string& error = "") {
    std::function<void()> then;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (over_) return;
      error_ = error;
      over_ = true;
      ended_.notify_all();
      then.swap(then_);
    }
    if (then) then();
  }

  Stamps stamps;  // all are there at the end

 private:
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  std::atomic<bool> over_{false};
  std::atomic<bool> waited_{false};
  const std::function<void()> awaited_;
  std::function<void()> then_;
  std::string error_;
};

using WorkRef = std::shared_ptr<Work>;

}  // namespace adaptra
