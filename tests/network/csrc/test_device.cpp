// Messages between two GPUs of one process, over the driver of tests/device/controlled, whose streams are
// threads: sends, receives, aborts, closed ends and failing calls in any order, whole and in pieces,
// also where one of two paths is cut.
// test_device [FIRST_SEED [COUNT]]: everything once per seed.
#include <cstring>
#include <deque>
#include <thread>

#include "chance.h"
#include "gpu/device_messages.h"
#include "pair.h"

extern "C" {
void* test_stream(void);
void test_fill(void* stream, void* at, int value, size_t bytes);
void test_copy(void* stream, void* to, const void* from, size_t bytes);
void test_finish(void* stream);
void test_fail(const char* call, int after, int code);
void test_unpinnable(int code);
void test_heal(void);
long test_pinned(void);
long test_streams(void);
long test_events(void);
long test_contexts(void);
}

using namespace adaptra;

namespace {

constexpr int kMessages = 60;
constexpr uint64_t kLongest = 200000;
constexpr int kAhead = 4;     // receives that are posted before they are needed
constexpr int kGone = 0xdd;   // what freed memory holds
constexpr uint64_t kSmall = 300;
constexpr uint64_t kLeast = 4096;  // bytes of a piece: a message has hundreds of events at most

Limits limits() {
  Limits limits;
  limits.window = 4 << 20;
  limits.piece = 64 << 10;
  limits.arena = 1 << 30;
  limits.beat = 0.05;
  limits.silence = 60;
  return limits;
}

int value_of(int side, int n) { return (7 * n + 100 * side + 1) % 200; }

struct Memory {
  std::unique_ptr<uint8_t[]> bytes;
  TransferRef transfer;
};

class Side {
 public:
  Side(Pair& pair, int side, uint64_t piece)
      : side_(side),
        device_(Device::open(side)),
        pinned_(std::make_shared<Pinned>(device_, pair.engines[side].arena(), 1 << 20)),
        stream_(static_cast<cuda::Stream>(static_cast<void*>(test_stream()))),
        messages_(DeviceMessages::open(pair.engines[side], device_, pinned_, 1ull << 40, {1 - side},
                                       "rank " + std::to_string(side), piece)) {}

  // All messages; some are given up at the receiver. Until the other side ends, if it does.
  void talk(Random random, const std::vector<uint64_t>& sizes, bool ends) {
    std::vector<Memory> sent;
    std::deque<std::pair<int, Memory>> posted;
    bool over = false;
    int next = 0;
    for (int n = 0; n < kMessages && !over; ++n) {
      if (chance(random, 10)) device_->anchor(stream_);
      std::unique_ptr<Mark> mark;
      if (chance(random, 20)) mark = std::make_unique<Mark>(device_, stream_);
      for (; next < kMessages && next < n + kAhead; ++next) {
        Memory memory{std::unique_ptr<uint8_t[]>(new uint8_t[kLongest]), nullptr};
        memory.transfer = messages_->receive(1 - side_, next, at(memory), sizes[next], stream_);
        posted.emplace_back(next, std::move(memory));
      }
      Memory memory{std::unique_ptr<uint8_t[]>(new uint8_t[sizes[n] + 1]), nullptr};
      test_fill(stream_, memory.bytes.get(), value_of(side_, n), sizes[n]);
      memory.transfer = messages_->send(1 - side_, n, at(memory), sizes[n], stream_);
      sent.push_back(std::move(memory));
      for (auto& one : sent) {  // who sends may free what is over
        if (!one.bytes || !one.transfer->over) continue;
        if (!one.transfer->work->error().empty()) test_finish(stream_);  // its producer may be late
        std::memset(one.bytes.get(), kGone, 1);
        one.bytes.reset();
      }
      auto [number, first] = std::move(posted.front());
      posted.pop_front();
      if (chance(random, 5)) {
        CHECK(messages_->abort(first.transfer, kPatience));
        std::memset(first.bytes.get(), kGone, kLongest);
        if (chance(random, 50)) first.bytes.reset();
        continue;
      }
      CHECK(first.transfer->work->wait(kPatience));
      if (!first.transfer->work->error().empty()) {
        CHECK(ends);
        over = true;
        sent.push_back(std::move(first));  // pieces of it may still be copied
        continue;
      }
      messages_->join(first.transfer, stream_);
      check(first, value_of(1 - side_, number), sizes[number]);
      if (chance(random, 10)) device_->soon([pinned = pinned_] { pinned->trim(false); });
      if (mark) CHECK(mark->at() || mark->fault().empty());
    }
    if (!ends) {
      for (auto& one : sent) CHECK(one.transfer->work->wait(kPatience));
    }
    CHECK(messages_->close(kPatience));
    test_finish(stream_);
  }

  void close() {
    messages_.reset();
    device_->soon([pinned = pinned_] { pinned->close(); });
    CHECK(device_->close(kPatience).empty());
  }

 private:
  static cuda::Address at(const Memory& memory) {
    return reinterpret_cast<cuda::Address>(memory.bytes.get());
  }

  void check(const Memory& memory, int value, uint64_t bytes) {
    std::vector<uint8_t> seen(bytes + 1);
    test_copy(stream_, seen.data(), memory.bytes.get(), bytes);
    test_finish(stream_);
    for (uint64_t n = 0; n < bytes; ++n) CHECK(seen[n] == value);
  }

  const int side_;
  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Pinned> pinned_;
  const cuda::Stream stream_;
  std::shared_ptr<DeviceMessages> messages_;
};

void nothing_left() {
  CHECK(test_pinned() == 0);
  CHECK(test_streams() == 0);
  CHECK(test_events() == 0);
  CHECK(test_contexts() == 0);
}

enum class Ending { Well, Closed, Failing };

void run(Random random, Ending ending) {
  {
    Pair pair(limits());
    const int paths = 1 + chance(random, 50);
    if (chance(random, 50)) {
      pair.shm();
    } else {
      pair.tcp();
    }
    if (paths > 1) pair.tcp();
    std::vector<uint64_t> sizes;
    for (int n = 0; n < kMessages; ++n) {
      sizes.push_back(random() % (chance(random, 30) ? kLongest : kSmall));
    }
    const auto piece = [&]() -> uint64_t {
      return chance(random, 30) ? DeviceMessages::kPiece : kLeast + random() % (64 << 10);
    };
    Side sides[2] = {{pair, 0, piece()}, {pair, 1, piece()}};
    if (chance(random, 20)) test_fail("cuMemHostRegister_v2", random() % 4, 801);
    if (chance(random, 10)) test_unpinnable(2);
    std::vector<std::thread> threads;
    for (int side = 0; side < 2; ++side) {
      threads.emplace_back([&, side, seed = random()] {
        sides[side].talk(Random(seed), sizes, ending != Ending::Well);
      });
    }
    static const char* const kCalls[] = {"cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"};
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20000));
    if (ending == Ending::Well && paths > 1) pair.cut(random());
    if (ending == Ending::Failing) test_fail(kCalls[random() % 2], random() % 20, 719);
    if (ending == Ending::Closed) {
      pair.engines[0].close("closed here");
      pair.engines[1].fail_peer(0, "it is gone");
    }
    for (auto& thread : threads) thread.join();
    test_heal();
    test_unpinnable(0);
    for (auto& engine : pair.engines) engine.close("the test is over");  // memory that it holds
    for (auto& side : sides) side.close();
    nothing_left();
  }
}

}  // namespace

int main(int count, char** words) {
  const unsigned long first = count > 1 ? std::strtoul(words[1], nullptr, 10) : 1;
  const unsigned long many = count > 2 ? std::strtoul(words[2], nullptr, 10) : 1;
  for (g_seed = first; g_seed < first + many; ++g_seed) {
    for (auto ending : {Ending::Well, Ending::Closed, Ending::Failing}) run(Random(g_seed), ending);
  }
  std::printf("%lu seeds from %lu on\n", many, first);
}
