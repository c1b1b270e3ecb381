// Engines with their threads, over real sockets and rings that are cut while messages run.
// test_engine [FIRST_SEED [COUNT]]: every test once per seed.
#include <sys/mman.h>

#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <thread>

#include "pair.h"

using namespace adaptra;

namespace {

constexpr uint64_t kLongestMessage = 3 << 20;
constexpr int kTags = 4;
constexpr Tag kGivenUp = kTags;  // of messages whose receives may be given up
constexpr uint64_t kLeast = 64, kSmall = 100000;  // their bytes
constexpr int kUnderWay = 24;    // messages of one thread
constexpr int kRound = 8;        // receives of which some are given up
constexpr int kCuts = 60;        // of paths, in one talk

using Random = std::mt19937_64;
uint64_t below(Random& random, uint64_t most) { return random() % most; }
bool chance(Random& random, int percent) { return below(random, 100) < uint64_t(percent); }

Limits limits(Random& random) {
  Limits limits;
  limits.window = 4 << 20;
  limits.piece = 4096 << below(random, 9);
  limits.arena = 1 << 30;
  limits.beat = 0.05;
  limits.silence = 60;  // a machine that is busy is not silence
  return limits;
}

// Memory that ends where it ends, so that the sanitizer sees who writes there too late.
using Bytes = std::unique_ptr<uint8_t[]>;
Bytes bytes(uint64_t size) { return Bytes(new uint8_t[size]); }

// All messages are parts of this.
const std::vector<uint8_t>& noise() {
  static const auto all = [] {
    std::vector<uint8_t> all(2 * kLongestMessage);
    Random random(1);
    for (auto& one : all) one = random();
    return all;
  }();
  return all;
}

struct Message {
  Tag tag;
  uint64_t size, from;  // where in the noise
  bool right(const uint8_t* memory) const {
    return size == 0 || std::memcmp(memory, &noise()[from], size) == 0;
  }
};

std::vector<Message> plan(Random& random, int count) {
  std::vector<Message> all;
  for (int n = 0; n < count; ++n) {
    const uint64_t most = chance(random, 5) ? kLongestMessage : chance(random, 50) ? 70000 : 300;
    const uint64_t size = chance(random, 10) ? 0 : below(random, most);
    all.push_back({below(random, kTags), size, below(random, kLongestMessage)});
  }
  return all;
}

// Messages both ways while paths are cut, and come back; with `ends`, one side is closed meanwhile.
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
    WorkRef work;
  };
  struct Received {
    const Message* message;
    Bytes memory;
    WorkRef work;
  };

  // Whether a work went well; it may fail only where a side is closed.
  bool well(const Work& work) {
    CHECK(work.done());
    CHECK(ends_ || work.error().empty());
    return work.error().empty();
  }

  Sent send_one(int side, Random& random, Tag tag, const uint8_t* what, uint64_t size) {
    Engine& engine = pair_.engines[side];
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
      const WorkRef work = sent.front().work;
      CHECK(work->wait(kPatience));
      if (well(*work)) CHECK(work->stamps.sent <= work->stamps.left);
      sent.pop_front();
    };
    for (int n = 0; n < count; ++n) {
      sent.push_back(next(n));
      const Stamps& early = sent.back().work->stamps;
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
    Engine& engine = pair_.engines[side];
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
    } else if (Tls::missing().empty() && chance(random, 20)) {
      pair_.encrypted();
    } else {
      pair_.tcp(Pair::kTcp + (chance(random, 50) ? kTrial : 0));
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

void timeouts_and_sizes(Random& random) {
  Pair pair(limits(random));
  pair.tcp();
  auto& [here, there] = pair.engines;
  auto memory = bytes(100);
  auto never = here.receive(1, 7, memory.get(), 100);
  CHECK(!never->wait(0) && !never->wait(0.01) && !never->done());
  std::thread waits([&] { CHECK(never->wait(1e300)); });
  here.abort(1, never);
  waits.join();
  CHECK(never->error() == "aborted");
  memory.reset();

  auto exact = bytes(50), room = bytes(50);
  auto wrong = here.receive(1, 7, exact.get(), 50);
  auto right = here.receive(1, 7, room.get(), 50, false);
  for (int n = 0; n < 2; ++n) CHECK(there.send(0, 7, &noise()[0], 40)->wait(kPatience));
  CHECK(wrong->wait(kPatience) && right->wait(kPatience));
  CHECK(wrong->error() == "awaited a message of 50 bytes, and one of 40 came");
  CHECK(right->error().empty() && std::memcmp(room.get(), &noise()[0], 40) == 0);
  CHECK(right->stamps.posted != 0 && right->stamps.completed >= right->stamps.posted);
}

void ends_are_reported(Random& random) {
  Limits short_lived = limits(random);
  short_lived.silence = 0.2;
  Pair pair(short_lived);
  auto& [here, there] = pair.engines;
  here.wake();
  CHECK(here.events(kPatience).empty());
  const auto [first, second] = chance(random, 50) ? pair.tcp() : pair.shm();
  pair.cut(0);
  for (int side = 0; side < 2; ++side) {
    const auto events = pair.engines[side].events(kPatience);
    CHECK(events.size() == 1 && events[0].rank == 1 - side);
    CHECK(events[0].path == (side == 0 ? first : second));
  }
  int ends[2];  // of which one says nothing
  connect_tcp(ends);
  here.add_tcp(1, ends[0], 0);
  const auto events = here.events(kPatience);
  CHECK(events.size() == 1 && events[0].what.find("no frame arrived for") == 0);
  close(ends[1]);
}

// A side that closes is noticed, also behind a ring full of messages.
void last_words(Random& random) {
  Pair pair(limits(random));
  pair.shm();
  auto memory = bytes(1);
  const auto never = pair.engines[1].receive(0, 7, memory.get(), 1);
  for (uint64_t n = below(random, 250); n > 0; --n) pair.engines[0].send(1, 1, memory.get(), 0);
  pair.engines[0].close("closed here");
  CHECK(never->wait(kPatience));
  CHECK(never->error() == "rank 0 has closed its engine");
}

template <typename Ask>
bool refused(Ask ask) {
  try {
    ask();
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

// What is no memory, or cannot be watched, leaves nothing behind; nor does what is for nobody.
void damaged_ends(Random& random) {
  Pair pair(limits(random));
  ShmEnds ends[2];
  connect_shm(pair.engines[0].arena_fd(), pair.engines[1].arena_fd(), ends);
  const auto another = [] { return Owned(memfd_create("another", MFD_CLOEXEC)); };
  ends[0].ring = another();
  ends[1].arena = another();
  for (int side = 0; side < 2; ++side) {
    Engine& engine = pair.engines[side];
    CHECK(refused([&] { engine.add_shm(1 - side, std::move(ends[side]), side == 0); }));
  }
  connect_shm(pair.engines[0].arena_fd(), pair.engines[1].arena_fd(), ends);
  ends[0].socket = another();
  const int path = pair.engines[0].add_shm(1, std::move(ends[0]), true);
  const auto events = pair.engines[0].events(kPatience);
  CHECK(events.size() == 1 && events[0].path == path);

  connect_shm(pair.engines[0].arena_fd(), pair.engines[1].arena_fd(), ends);
  CHECK(refused([&] { pair.engines[0].add_shm(7, std::move(ends[0]), true); }));
  int connected[2];
  connect_tcp(connected);
  CHECK(refused([&] { pair.engines[0].add_tcp(7, connected[0], 0); }));
  char nothing;
  CHECK(recv(Owned(connected[1]), &nothing, 1, 0) == 0);
}

// From several threads at once, with messages and new paths beside it.
void closed_from_all_sides(Random& random) {
  Pair pair(limits(random));
  pair.shm();
  std::vector<std::thread> threads;
  for (int n = 0; n < 6; ++n) {
    threads.emplace_back([&, n, seed = random()] {
      Random random(seed);
      Engine& engine = pair.engines[n % 2];
      const int peer = 1 - n % 2;
      std::this_thread::sleep_for(std::chrono::microseconds(below(random, 1000)));
      if (n < 2) {
        for (int m = 0; m < 100; ++m) engine.send(peer, 1, &noise()[0], below(random, 100000));
        if (chance(random, 50)) pair.tcp();
      } else {
        engine.close("closed here");
        auto memory = bytes(10);
        auto late = engine.receive(peer, 1, memory.get(), 10);
        CHECK(late->done() && late->error() == "closed here");
      }
    });
  }
  for (auto& one : threads) one.join();
}

// A message whose bytes come in parts is sent by the loop's thread: nothing of it goes out while
// that stands still, in a callback of another peer's.
void sent_by_the_loop(Random& random) {
  Pair pair(limits(random));
  pair.tcp();
  Engine third(limits(random));
  third.add_peer(0, "rank 0");
  pair.engines[0].add_peer(2, "rank 2");
  int ends[2];
  connect_tcp(ends);
  pair.engines[0].add_tcp(2, ends[0], Pair::kTcp);
  third.add_tcp(0, ends[1], Pair::kTcp);
  uint8_t byte = 0;
  std::promise<void> stands, go;
  const auto awaited = pair.engines[0].receive(2, 1, &byte, 1);
  CHECK(awaited->then([&] {
    stands.set_value();
    go.get_future().wait();
  }));
  third.send(0, 1, &byte, 1);
  stands.get_future().wait();
  const uint64_t size = 1 + below(random, kLongestMessage);
  auto memory = pair.engines[0].take(size);
  Bytes got = bytes(size);
  for (uint64_t n = 0; n < size; ++n) memory.get()[n] = uint8_t(n * 7);
  std::shared_ptr<Engine::Filling> filling;
  const auto received = pair.engines[1].receive(0, 5, got.get(), size);
  const auto sent = pair.engines[0].begin(1, 5, memory, size, 0, &filling);
  const uint64_t half = size / 2;
  if (half > 0) pair.engines[0].filled(filling, half);
  pair.engines[0].filled(filling, size);
  CHECK(pair.engines[0].counts(1).bytes_sent == 0);
  go.set_value();
  CHECK(received->wait(kPatience) && received->error().empty());
  CHECK(std::memcmp(got.get(), memory.get(), size) == 0);
  CHECK(sent->wait(kPatience));
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned long first = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 1;
  const unsigned long count = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 10;
  noise();
  const size_t before = open_descriptors();
  for (g_seed = first; g_seed < first + count; ++g_seed) {
    Random random(g_seed);
    timeouts_and_sizes(random);
    ends_are_reported(random);
    last_words(random);
    damaged_ends(random);
    closed_from_all_sides(random);
    sent_by_the_loop(random);
    Talk(random(), false, 100).run();
    Talk(random(), true, 100).run();
    CHECK(open_descriptors() == before);
  }
  std::printf("%lu times from seed %lu\n", count, first);
}
