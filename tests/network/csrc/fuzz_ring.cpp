// Whatever another process writes into a ring, the engine that reads it neither crashes nor grows.
// fuzz_ring [SEED [FRAMES]]. The ring is laid out here as docs/wire-protocol.md says.
#include <sys/mman.h>

#include <chrono>
#include <thread>

#include "frames.h"
#include "memory.h"
#include "pair.h"

using namespace adaptra;

namespace {

constexpr uint64_t kSlots = 256, kPiece = 4096, kWindow = 64 << 10, kArena = 1 << 20;

constexpr uint64_t kFrames = 500;  // into one ring
constexpr int kTries = 100;

struct RingHalf {
  alignas(64) std::atomic<uint64_t> pushed;
  alignas(64) std::atomic<uint64_t> popped;
  alignas(64) std::atomic<uint32_t> reader_sleeps;
  std::atomic<uint32_t> writer_waits;
  std::atomic<uint32_t> closed;
  struct {
    Header header;
    uint64_t at;
  } slots[kSlots];
};

Limits limits() {
  Limits limits;
  limits.window = kWindow;
  limits.piece = kPiece;
  limits.arena = kArena;
  limits.beat = 0.05;
  return limits;
}

// A process that has the first half of a ring, and does what it likes.
class Stranger {
 public:
  Stranger(Engine& engine, int peer, Speaker& speaker, int arena) : speaker_(speaker) {
    ShmEnds ends[2];
    connect_shm(arena, engine.arena_fd(), ends);
    mine_ = std::move(ends[0]);
    void* at = mmap(nullptr, 2 * sizeof(RingHalf), PROT_READ | PROT_WRITE, MAP_SHARED, mine_.ring, 0);
    CHECK(at != MAP_FAILED);
    halves_ = static_cast<RingHalf*>(at);
    engine.add_shm(peer, std::move(ends[1]), false);
  }
  ~Stranger() {
    munmap(halves_, 2 * sizeof(RingHalf));
  }

  // Reads whatever comes, and asks for a wake-up each time; but does not read those.
  void sleep_deeply(Engine& engine, int peer) {
    constexpr int kMessages = 2000;  // more than a socket holds bytes, each in a packet of its own
    for (int n = 0; n < kMessages; ++n) {
      halves_[1].reader_sleeps = 1;
      engine.send(peer, 0, nullptr, 0);
      listen();
    }
    CHECK(read_ >= kMessages);
  }

  // Frames until there are `most`, or the reader has hung up or lost its place; how many.
  uint64_t speak(int percent, uint64_t most) {
    uint64_t count = 0;
    for (uint64_t pushed = 0; count < most && !over(); ++count) {
      for (int n = 0; pushed - halves_[0].popped >= kSlots; ++n) {
        if (over() || (harmed_ && n == kTries)) return count;
        wake();
        std::this_thread::yield();
      }
      auto& slot = halves_[0].slots[pushed % kSlots];
      slot.header = speaker_.next(percent);
      slot.at = speaker_.below(speaker_.chance(percent) ? 2 * kArena : kArena - kPiece);
      halves_[0].pushed = ++pushed;
      if (speaker_.below(2000) < uint64_t(percent)) harm();
      if (halves_[0].reader_sleeps.exchange(0) || speaker_.chance(1)) wake();
      listen();
    }
    wake();
    return count;
  }

 private:
  bool over() { return halves_[1].closed; }

  void wake() {
    [[maybe_unused]] const ssize_t sent = send(mine_.socket, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
  }

  void listen() {
    for (; !harmed_ && read_ != halves_[1].pushed; ++read_) {
      speaker_.take(halves_[1].slots[read_ % kSlots].header);
      halves_[1].popped = read_ + 1;
    }
  }

  // To what is not a slot.
  void harm() {
    harmed_ = true;
    RingHalf& half = halves_[speaker_.below(2)];
    switch (speaker_.below(5)) {
      case 0: half.pushed = speaker_.below(~uint64_t{0}); break;
      case 1: half.popped = speaker_.below(~uint64_t{0}); break;
      case 2: half.reader_sleeps = speaker_.below(3); break;
      case 3: half.writer_waits = speaker_.below(3); break;
      default: half.closed = speaker_.below(3);
    }
  }

  Speaker& speaker_;
  ShmEnds mine_;
  RingHalf* halves_;
  uint64_t read_ = 0;
  bool harmed_ = false;
};

}  // namespace

int main(int argc, char** argv) {
  g_seed = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 1;
  const uint64_t frames = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 200000;
  const auto arena = Arena::make(kArena);  // the stranger's
  const size_t descriptors = open_descriptors();
  const uint64_t before = allocated();
  uint64_t count = 0, rings = 0, received = 0;
  {
    Limits wide = limits();
    wide.arena = 64 << 20;
    Engine engine(wide);
    engine.add_peer(0, "rank 0");
    Speaker speaker(g_seed, kPiece, kWindow);
    Stranger(engine, 0, speaker, arena->fd()).sleep_deeply(engine, 0);
  }
  while (count < frames) {
    Engine engine(limits());
    engine.add_peer(0, "rank 0");
    Speaker speaker(g_seed + rings, kPiece, kWindow);
    uint8_t memory[Speaker::kTags][kPiece], sent[kPiece] = {};
    const int percent = std::array{0, 1, 5, 30}[speaker.below(4)];
    for (int n = 0; n < 20; ++n, ++rings) {
      for (Tag tag = 0; tag < Speaker::kTags; ++tag) {
        engine.receive(0, tag, memory[tag], kPiece, false);
        engine.send(0, tag, sent, speaker.below(kPiece));
      }
      speaker.again();
      Stranger stranger(engine, 0, speaker, arena->fd());
      const uint64_t frames = stranger.speak(percent, kFrames);
      CHECK(percent > 0 || frames == kFrames);  // what is right is taken
      count += frames;
      CHECK(engine.counts(0).kept <= kWindow);
    }
    received += engine.counts(0).received;
    engine.close("over");
  }
  CHECK(open_descriptors() == descriptors);
  CHECK(allocated() < before + (1 << 20));
  std::printf("%lu frames in %lu rings from seed %lu: %lu messages came\n", count, rings, g_seed,
              received);
  return received > 0 ? 0 : 1;
}
