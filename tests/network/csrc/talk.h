// Messages both ways between two engines, while their paths are cut and come back.
#pragma once

#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "chance.h"
#include "pair.h"

constexpr uint64_t kLongestMessage = 3 << 20;
constexpr int kTags = 4;
constexpr adaptra::Tag kGivenUp = kTags;  // of messages whose receives may be given up
constexpr uint64_t kLeast = 64, kSmall = 100000;  // their bytes
constexpr int kUnderWay = 24;    // messages of one thread
constexpr int kRound = 8;        // receives of which some are given up
constexpr int kCuts = 60;        // of paths, in one talk

inline adaptra::Limits limits(Random& random) {
  adaptra::Limits limits;
  limits.window = 4 << 20;
  limits.piece = 4096 << below(random, 9);
  limits.arena = 1 << 30;
  limits.beat = 0.05;
  limits.silence = 60;  // a machine that is busy is not silence
  return limits;
}

// Memory that ends where it ends, so that the sanitizer sees who writes there too late.
using Bytes = std::unique_ptr<uint8_t[]>;
inline Bytes bytes(uint64_t size) { return Bytes(new uint8_t[size]); }

// All messages are parts of this.
inline const std::vector<uint8_t>& noise() {
  static const auto all = [] {
    std::vector<uint8_t> all(2 * kLongestMessage);
    Random random(1);
    for (auto& one : all) one = random();
    return all;
  }();
  return all;
}

struct Message {
  adaptra::Tag tag;
  uint64_t size, from;  // where in the noise
  bool right(const uint8_t* memory) const {
    return size == 0 || std::memcmp(memory, &noise()[from], size) == 0;
  }
};

inline std::vector<Message> plan(Random& random, int count) {
  std::vector<Message> all;
  for (int n = 0; n < count; ++n) {
    const uint64_t most = chance(random, 5) ? kLongestMessage : chance(random, 50) ? 70000 : 300;
    const uint64_t size = chance(random, 10) ? 0 : below(random, most);
    all.push_back({below(random, kTags), size, below(random, kLongestMessage)});
  }
  return all;
}

// One such exchange; with `ends`, one side is closed meanwhile.
class Talk {
 public:
  Talk(unsigned long seed, bool ends, int count)
      : ends_(ends), random_(seed), pair_(limits(random_)), count_(count) {}

  void run() {
    for (int side = 0; side < 2; ++side) plans_[side] = plan(random_, count_);
    connect(random_);
    std::vector<std::thread> talking, beside;
    for (int side = 0; side < 2; ++side) {
      const uint64_t seed = random_();
      talking.emplace_back([=] { send(side, Random(seed)); });
      talking.emplace_back([=] { receive(side, Random(seed + 1)); });
      talking.emplace_back([=] { send_small(side, Random(seed + 2)); });
      talking.emplace_back([=] { give_up(side, Random(seed + 3)); });
      beside.emplace_back([=] { look(side); });
    }
    beside.emplace_back([this, seed = random_()] { cut(Random(seed)); });
    if (ends_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(below(random_, 60)));
      const int who = below(random_, 2);
      pair_.engines[who].close("closed here");
      // Where every path was cut no frame of it arrives; then an endpoint reports it.
      pair_.engines[1 - who].fail_peer(who, "it is gone");
    }
    for (auto& one : talking) one.join();
    over_ = true;
    for (auto& engine : pair_.engines) engine.wake();
    for (auto& one : beside) one.join();
    if (ends_) return;
    for (int side = 0; side < 2; ++side) {
      const auto counts = pair_.engines[side].counts(1 - side);
      CHECK(counts.kept == 0);
      CHECK(counts.received == uint64_t(2 * count_));
      CHECK(counts.sent == uint64_t(2 * count_));
    }
  }

 private:
  struct Sent {
    Bytes copied;
    std::shared_ptr<uint8_t> taken;
    adaptra::WorkRef work;
  };
  struct Received {
    const Message* message;
    Bytes memory;
    adaptra::WorkRef work;
  };

  // Whether a work went well; it may fail only where a side is closed.
  bool well(const adaptra::Work& work) {
    CHECK(work.done());
    CHECK(ends_ || work.error().empty());
    return work.error().empty();
  }

  Sent send_one(int side, Random& random, adaptra::Tag tag, const uint8_t* what, uint64_t size) {
    adaptra::Engine& engine = pair_.engines[side];
    Sent one;
    const uint8_t* at;
    if (chance(random, 50)) {
      one.taken = engine.take(size);
      if (size > 0) std::memcpy(one.taken.get(), what, size);
      at = one.taken.get();
    } else {
      one.copied = bytes(size);
      if (size > 0) std::memcpy(one.copied.get(), what, size);
      at = one.copied.get();
    }
    one.work = engine.send(1 - side, tag, at, size);
    one.copied.reset();  // a copy was made of it
    return one;
  }

  // Send what `next` gives, and wait for the oldest where much is under way.
  template <typename Next>
  void send_all(int count, Next next) {
    std::deque<Sent> sent;
    auto wait = [&] {
      const adaptra::WorkRef work = sent.front().work;
      CHECK(work->wait(kPatience));
      if (well(*work)) CHECK(work->stamps.sent <= work->stamps.left);
      sent.pop_front();
    };
    for (int n = 0; n < count; ++n) {
      sent.push_back(next(n));
      const adaptra::Stamps& early = sent.back().work->stamps;
      CHECK(early.left == 0 || early.left >= early.sent);
      if (sent.size() > kUnderWay) wait();
    }
    while (!sent.empty()) wait();
  }

  void send(int side, Random random) {
    send_all(count_, [&](int n) {
      const Message& one = plans_[side][n];
      return send_one(side, random, one.tag, &noise()[one.from], one.size);
    });
  }

  void receive(int side, Random random) {
    std::deque<Received> receives;
    auto wait = [&](size_t n) {
      Received& one = receives[n];
      CHECK(one.work->wait(kPatience));
      if (well(*one.work)) {
        CHECK(one.message->right(one.memory.get()));
        CHECK(one.work->stamps.sent <= one.work->stamps.completed);
      }
      receives.erase(receives.begin() + n);
    };
    for (const Message& message : plans_[1 - side]) {
      receives.push_back({&message, bytes(message.size), nullptr});
      Received& one = receives.back();
      one.work = pair_.engines[side].receive(1 - side, message.tag, one.memory.get(), message.size);
      if (chance(random, 3)) {  // those who send are ahead, or behind
        std::this_thread::sleep_for(std::chrono::microseconds(below(random, 3000)));
      }
      while (receives.size() > kUnderWay) wait(below(random, receives.size()));
    }
    while (!receives.empty()) wait(0);
  }

  // Messages that say which one they are.
  void send_small(int side, Random random) {
    send_all(count_, [&](int n) {
      const uint64_t size = kLeast + below(random, kSmall - kLeast);
      auto what = bytes(size);
      std::memcpy(what.get(), &noise()[n], size);
      std::memcpy(what.get(), &n, sizeof n);
      return send_one(side, random, kGivenUp, what.get(), size);
    });
  }

  // Receives them in rounds, of which another thread gives some up: their memory goes at once.
  void give_up(int side, Random random) {
    adaptra::Engine& engine = pair_.engines[side];
    bool going = true;
    for (int last = -1; going && last < count_ - 1;) {
      const bool some = last < count_ - 1 - 2 * kRound;  // else too few messages may be left
      std::vector<Received> round(some ? kRound : 1);
      for (auto& one : round) {
        one.memory = bytes(kSmall);
        one.work = engine.receive(1 - side, kGivenUp, one.memory.get(), kSmall, false);
      }
      std::thread giving_up([&, seed = random()] {
        Random random(seed);
        for (auto& one : round) {
          if (!some || chance(random, 60)) continue;
          engine.abort(1 - side, one.work);
          CHECK(one.work->done());
          if (!one.work->error().empty()) one.memory.reset();
        }
      });
      for (auto& one : round) {
        CHECK(one.work->wait(kPatience));
        const std::string error = one.work->error();
        if (error == "aborted") continue;
        CHECK(ends_ || error.empty());
        going = going && error.empty();
        if (!error.empty()) continue;
        int number;
        std::memcpy(&number, one.memory.get(), sizeof number);
        CHECK(last < number && number < count_);
        CHECK(std::memcmp(one.memory.get() + 4, &noise()[number + 4], kLeast - 4) == 0);
        last = number;
      }
      giving_up.join();
    }
  }

  void connect(Random& random) {
    if (chance(random, shm_)) {
      pair_.shm();
    } else if (adaptra::Tls::missing().empty() && chance(random, 20)) {
      pair_.encrypted();
    } else {
      pair_.tcp(Pair::kTcp + (chance(random, 50) ? adaptra::kTrial : 0));
    }
  }

  void cut(Random random) {
    for (int cuts = 0; cuts < kCuts && !over_;) {
      std::this_thread::sleep_for(std::chrono::microseconds(below(random, 5000)));
      if (pair_.whole() < 6) connect(random);
      if (chance(random, 60)) cuts += pair_.cut(random());
    }
    connect(random);
  }

  // What others may ask for at any time.
  void look(int side) {
    while (!over_) {
      for (auto& event : pair_.engines[side].events(kPatience)) {
        CHECK(event.rank == 1 - side && event.path > 0);
      }
      pair_.engines[side].counts(1 - side);
    }
  }

  const bool ends_;
  Random random_;
  const int shm_ = 50 * below(random_, 3);  // percent of the paths
  Pair pair_;
  const int count_;
  std::vector<Message> plans_[2];
  std::atomic<bool> over_{false};
};
