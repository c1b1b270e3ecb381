#include "core/loop.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace adaptra {

namespace {

int checked(int result, const char* what) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), what);
  return result;
}

}  // namespace

Loop::Loop()
    : epoll_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      wake_(checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {
  control(EPOLL_CTL_ADD, wake_, EPOLLIN, 0);
  thread_ = std::thread([this] { run(); });
}

Loop::~Loop() {
  stop();
  ::close(wake_);
  ::close(epoll_);
}

void Loop::watch(int fd, uint32_t events, Ready ready) {
  std::lock_guard<std::mutex> lock(mutex_);
  control(EPOLL_CTL_ADD, fd, events, ++watches_);
  watched_[fd] = {watches_, std::make_shared<Ready>(std::move(ready))};
}

void Loop::change(int fd, uint32_t events) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto known = watched_.find(fd);
  if (known != watched_.end()) control(EPOLL_CTL_MOD, fd, events, known->second.id);
}

void Loop::control(int operation, int fd, uint32_t events, uint32_t id) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = uint64_t{id} << 32 | static_cast<uint32_t>(fd);
  checked(epoll_ctl(epoll_, operation, fd, &event), "epoll_ctl");
}

void Loop::unwatch(int fd) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (watched_.erase(fd)) epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
}

void Loop::soon(std::function<void()> job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return;  // nobody would run it, and what it holds has to go
    jobs_.push_back(std::move(job));
  }
  wake();
}

void Loop::every(std::chrono::milliseconds period, std::function<void()> job) {
  soon([this, period, job = std::move(job)] {
    period_ = period;
    periodic_ = job;
    next_ = std::chrono::steady_clock::now() + period;
  });
}

int Loop::until_next() {
  if (!periodic_) return -1;
  auto left = next_ - std::chrono::steady_clock::now();
  if (left <= left.zero()) {
    periodic_();
    next_ = std::chrono::steady_clock::now() + period_;
    left = period_;
  }
  return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(left).count());
}

void Loop::stop() {
  std::lock_guard<std::mutex> lock(ending_);
  if (!thread_.joinable()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake();
  thread_.join();
  std::deque<std::function<void()>> dropped;
  std::lock_guard<std::mutex> jobs(mutex_);
  dropped.swap(jobs_);
}

void Loop::wake() {
  const uint64_t one = 1;
  // It cannot fail but when 2^64 - 2 wake-ups are waiting.
  [[maybe_unused]] const ssize_t written = ::write(wake_, &one, sizeof one);
}

void Loop::run() {
  epoll_event events[64];
  while (!stopping_) {
    const int count = epoll_wait(epoll_, events, 64, until_next());
    for (int n = 0; n < count && !stopping_; ++n) {
      const int fd = static_cast<int>(events[n].data.u64 & UINT32_MAX);
      if (fd == wake_) {
        uint64_t rung;
        [[maybe_unused]] const ssize_t read = ::read(wake_, &rung, sizeof rung);
        continue;
      }
      std::shared_ptr<Ready> ready;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        auto at = watched_.find(fd);
        const bool same = at != watched_.end() && at->second.id == events[n].data.u64 >> 32;
        if (same) ready = at->second.ready;
      }
      if (ready) (*ready)(events[n].events);
    }
    std::deque<std::function<void()>> jobs;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      jobs.swap(jobs_);
    }
    for (auto& job : jobs) job();
  }
}

}  // namespace adaptra
