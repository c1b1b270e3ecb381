// A thread that waits for descriptors, and does nothing while nothing happens.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace adaptra {

class Loop {
 public:
  using Ready = std::function<void(uint32_t events)>;

  Loop();
  ~Loop();

  // Call `ready` on the loop's thread whenever `fd` has one of `events` (EPOLLIN, ...).
  void watch(int fd, uint32_t events, Ready ready);
  void change(int fd, uint32_t events);

  // After this `ready` of that `fd` is not called any more; from another thread it may be running.
  void unwatch(int fd);

  // Run `job` on the loop's thread, soon.
  void soon(std::function<void()> job);

  // Run `job` on the loop's thread every `period`; called once, and first after a period.
  void every(std::chrono::milliseconds period, std::function<void()> job);

  // End the thread; from another one. Jobs that have not run are dropped.
  void stop();

 private:
  void run();        // the thread
  int until_next();  // on it: milliseconds; runs the periodic job when its time has come
  void control(int operation, int fd, uint32_t events, uint32_t id);  // epoll_ctl; throws
  void wake();       // on any thread: end the wait

  int epoll_, wake_;
  std::mutex mutex_;
  struct Watched {
    uint32_t id;  // of events: a descriptor's number may be another one's by then
    std::shared_ptr<Ready> ready;
  };
  std::unordered_map<int, Watched> watched_;
  uint32_t watches_ = 0;
  std::deque<std::function<void()>> jobs_;
  std::function<void()> periodic_;
  std::chrono::milliseconds period_{0};
  std::atomic<bool> stopping_{false};
  std::chrono::steady_clock::time_point next_;  // of the loop's thread alone
  std::mutex ending_;
  std::thread thread_;
};

}  // namespace adaptra
