// Engines with their threads, over real sockets and rings that are cut while messages run.
// test_engine [FIRST_SEED [COUNT]]: every test once per seed.
#include <sys/mman.h>

#include <cstring>
#include <future>
#include <thread>

#include "pair.h"
#include "talk.h"

using namespace adaptra;

namespace {

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
