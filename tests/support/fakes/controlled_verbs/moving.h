// What moves between queue pairs of libibverbs.cpp that were connected: writes with a word. Each pair
// sends over a link of its own, with a delay each way and a rate. Nothing else bounds what is under way.
#pragma once

#include <unistd.h>

#include <arpa/inet.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "verbs/verbs_abi.h"

namespace moving {

using namespace adaptra::ibv;
using Clock = std::chrono::steady_clock;

struct Queue : Cq {
  std::deque<Completion> found;
  bool armed = false;
};

struct Pair : Qp {
  uint32_t peer = 0;
  size_t receives = 0;
  bool failed = false;
  Clock::time_point idle;  // when its link has sent what it was given
  uint64_t under_way = 0;
};

class Fabric {
 public:
  void link(int delay_us, int megabytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    delay_ = std::chrono::microseconds(delay_us);
    rate_ = megabytes;
  }

  // The most bytes that were under way from one queue pair.
  uint64_t most_under_way() {
    std::lock_guard<std::mutex> lock(mutex_);
    return most_;
  }

  // Bytes that have arrived, of all queue pairs.
  uint64_t moved() {
    std::lock_guard<std::mutex> lock(mutex_);
    return moved_;
  }

  Mr* open(Pd* pd, void* at, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* mr = new Mr{pd->context, pd, at, bytes, 0, ++keys_, keys_};
    memory_[mr->rkey] = mr;
    return mr;
  }
  void close(Mr* mr) {
    std::lock_guard<std::mutex> lock(mutex_);
    memory_.erase(mr->rkey);
    delete mr;
  }

  Pair* open(const Pd* pd, const QpInit& init) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* pair = new Pair{};
    pair->context = pd->context;
    pair->send_cq = init.send_cq;
    pair->receive_cq = init.receive_cq;
    pair->number = ++numbers_;
    pairs_[pair->number] = pair;
    return pair;
  }
  void close(Pair* pair) {
    std::lock_guard<std::mutex> lock(mutex_);
    pairs_.erase(pair->number);
    delete pair;
  }
  void change(Pair* pair, const QpAttributes& to) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (to.state == kReadyToReceive) pair->peer = to.destination_qp;
    pair->failed = pair->failed || to.state == kError;
  }

  int receive(Pair* pair) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++pair->receives;
    return 0;
  }

  int send(Pair* pair, const SendWr* wr) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    for (; wr != nullptr; wr = wr->next) {
      Write write{pair->number, *wr, {wr->sges, wr->sges + wr->sge_count}, {}, 0};
      for (const Sge& sge : write.sges) write.bytes += sge.length;
      if (wr->flags & kInline) write.inlined = gathered(write);
      pair->under_way += write.bytes;
      most_ = std::max(most_, pair->under_way);
      pair->idle = std::max(pair->idle, Clock::now());
      if (rate_ > 0) pair->idle += std::chrono::nanoseconds(write.bytes * 1000 / rate_);
      at_.emplace(pair->idle + delay_, [this, write = std::move(write)] { arrive(write); });
    }
    changed_.notify_one();
    return 0;
  }

  int poll(Queue* queue, int most, Completion* into) {
    std::lock_guard<std::mutex> lock(mutex_);
    int count = 0;
    for (; count < most && !queue->found.empty(); ++count) {
      into[count] = queue->found.front();
      queue->found.pop_front();
    }
    return count;
  }
  void arm(Queue* queue) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue->armed = true;
  }

 private:
  struct Write {
    uint32_t from;
    SendWr wr;
    std::vector<Sge> sges;
    std::vector<char> inlined;
    uint64_t bytes;
  };

  static std::vector<char> gathered(const Write& write) {
    std::vector<char> bytes;
    for (const Sge& sge : write.sges) {
      auto* at = reinterpret_cast<const char*>(sge.address);
      bytes.insert(bytes.end(), at, at + sge.length);
    }
    return bytes;
  }

  // All of what follows: with mutex_ held.

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (at_.empty()) {
        changed_.wait(lock);
      } else if (auto next = at_.begin(); next->first <= Clock::now()) {
        auto act = std::move(next->second);
        at_.erase(next);
        act();
      } else {
        changed_.wait_until(lock, next->first);
      }
    }
  }

  void arrive(const Write& write) {
    auto from = pairs_.find(write.from);
    if (from == pairs_.end() || from->second->failed) return;
    auto to = pairs_.find(from->second->peer);
    if (to == pairs_.end() || to->second->failed) return over(write, kRetryExceeded);
    auto memory = memory_.find(write.wr.remote.rkey);
    if (write.bytes > 0) {
      if (memory == memory_.end()) return over(write, kRemoteFirst);
      const auto begin = reinterpret_cast<uint64_t>(memory->second->address);
      const uint64_t at = write.wr.remote.address;
      if (at < begin || at + write.bytes > begin + memory->second->length) {
        return over(write, kRemoteFirst);
      }
      const auto bytes = write.wr.flags & kInline ? write.inlined : gathered(write);
      std::memcpy(reinterpret_cast<void*>(at), bytes.data(), bytes.size());
    }
    if (to->second->receives == 0) return over(write, kRnrRetryExceeded);
    --to->second->receives;
    moved_ += write.bytes;
    Completion word{};
    word.opcode = kReceived;
    word.bytes = static_cast<uint32_t>(write.bytes);
    word.immediate = write.wr.immediate;
    put(to->second->receive_cq, word);
    at_.emplace(Clock::now() + delay_, [this, write] { over(write, kSuccess); });
  }

  void over(const Write& write, int status) {
    auto from = pairs_.find(write.from);
    if (from == pairs_.end()) return;
    from->second->under_way -= write.bytes;
    if (status == kSuccess && !(write.wr.flags & kSignaled)) return;
    Completion word{};
    word.id = write.wr.id;
    word.status = status;
    put(from->second->send_cq, word);
  }

  static void put(Cq* cq, const Completion& word) {
    auto* queue = static_cast<Queue*>(cq);
    queue->found.push_back(word);
    if (!queue->armed) return;
    queue->armed = false;
    const uint64_t one = 1;
    if (write(queue->channel->fd, &one, sizeof one) < 0) std::abort();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_;  // runs until the process ends
  std::multimap<Clock::time_point, std::function<void()>> at_;
  std::map<uint32_t, Mr*> memory_;
  std::map<uint32_t, Pair*> pairs_;
  std::chrono::microseconds delay_{0};
  int rate_ = 0;  // MB/s; 0: of no limit
  uint32_t keys_ = 0, numbers_ = 0;
  uint64_t most_ = 0, moved_ = 0;
};

}  // namespace moving
