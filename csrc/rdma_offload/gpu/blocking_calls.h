// A thread for calls that may wait for long: it begins with the first job, and ends with the last.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "core/work.h"

namespace adaptra {

class BlockingCalls {
 public:
  using Job = std::function<void()>;  // throws nothing

  // `begins`: runs first on the thread.
  explicit BlockingCalls(Job begins) : begins_(std::move(begins)) {}

  // False once it has closed; what jobs add is done before that.
  bool add(Job job) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (over_ || (closed_ && !thread_.joinable())) return false;
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    jobs_.push_back(std::move(job));
    changed_.notify_all();
    return true;
  }

  // All jobs are done; false if one has not come back after `seconds`: this has to stay for ever.
  bool close(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    if (!thread_.joinable()) return true;
    const bool ended = ended_.wait_for(lock, patience(seconds), [this] { return over_; });
    lock.unlock();
    ended ? thread_.join() : thread_.detach();
    return ended;
  }

 private:
  void run() {  // the thread
    begins_();
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return closed_ || !jobs_.empty(); });
      if (jobs_.empty()) break;
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
      job = nullptr;
      lock.lock();
    }
    over_ = true;
    ended_.notify_all();
  }

  const Job begins_;
  std::mutex mutex_;
  std::condition_variable changed_, ended_;
  std::deque<Job> jobs_;
  bool closed_ = false, over_ = false;
  std::thread thread_;
};

}  // namespace adaptra
