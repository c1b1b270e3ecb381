// Whatever comes over a stream, a decoder and a peer neither crash nor grow.
// fuzz_wire [SEED [FRAMES]]; with libFuzzer: clang++ -DLIBFUZZER -fsanitize=fuzzer,address,undefined.
#include <algorithm>

#include "check.h"
#include "core/peer.h"
#include "frames.h"
#include "memory.h"
#include "tcp/decoder.h"

using namespace adaptra;

namespace {

constexpr uint64_t kWindow = 256 << 10, kPiece = 64 << 10;
constexpr uint64_t kLargest = 1000;   // bytes of a message that is received
constexpr uint64_t kReceives = 16;    // that wait at a time
constexpr int kStreams = 100;         // of one peer
constexpr Nanoseconds kNever = 1ull << 60;
constexpr uint64_t kBound = 64 << 20; // bytes that a peer may take here

// It reports frames to the speaker, and sometimes takes nothing.
struct Back : Path {
  explicit Back(Speaker* speaker)
      : Path(speaker && speaker->chance(50) ? kTrial : 0, kPiece), speaker(speaker) {}
  bool takes() const override { return open; }
  uint64_t waiting() const override { return 0; }
  void send(const Header& header, const uint8_t* payload, std::shared_ptr<void>) override {
    if (header.length > 0) sum += payload[0] + payload[header.length - 1];  // it can be read
    if (speaker) speaker->take(header);
  }
  void close() override {}
  void fail(const std::string&) override {}
  Speaker* const speaker;
  bool open = true;
  uint64_t sum = 0;
};

// What has been read so far, until the stream ends.
struct Stream {
  explicit Stream(Speaker* speaker = nullptr) : path(std::make_shared<Back>(speaker)) {}

  // Whether all of `size` bytes were taken.
  bool feed(const uint8_t* data, size_t size, Peer& peer) {
    while (size > 0) {
      const ssize_t got = decoder.read(*path, peer, [&](uint8_t* to, size_t most) -> ssize_t {
        const size_t part = std::min(most, size);
        std::memcpy(to, data, part);
        return part;
      });
      if (!decoder.fault().empty()) return false;
      data += got;
      size -= got;
    }
    return true;
  }
  const std::shared_ptr<Back> path;
  Decoder decoder{kPiece};
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Peer peer("rank 1", kWindow);
  Stream stream;
  peer.add(stream.path);
  uint8_t memory[Speaker::kTags][kLargest];
  for (Tag tag = 0; tag < Speaker::kTags; ++tag) peer.receive(tag, memory[tag], kLargest, false);
  for (Tag tag = 0; tag < Speaker::kTags; ++tag) {
    peer.send(tag, Memory(new uint8_t[9](), std::default_delete<uint8_t[]>()), 9);
  }
  if (!stream.feed(data, size, peer)) peer.failed(*stream.path, "fuzzed");
  CHECK(peer.counts().kept <= kWindow);
  peer.close("over");
  return 0;
}

#ifndef LIBFUZZER

namespace {

struct Totals {
  uint64_t frames = 0, streams = 0, ended = 0, received = 0, most = 0;
};

// One peer, streams of which come and end, and what its own side does meanwhile.
class Victim {
 public:
  Victim(uint64_t seed, Totals& totals) : speaker_(seed, kPiece, kWindow), totals_(totals) {}

  void run(uint64_t frames) {
    const uint64_t limit = totals_.frames + frames;
    for (int n = 0; n < kStreams && totals_.frames < limit; ++n) {
      stream();
      CHECK(peer_.counts().kept <= kWindow);
      CHECK(allocated() < before_ + kBound);
      totals_.most = std::max(totals_.most, allocated() - before_);
    }
    totals_.received += peer_.counts().received;
    peer_.close("over");
    for (auto& one : receives_) CHECK(one.work->done());
  }

 private:
  struct Receive {
    std::unique_ptr<uint8_t[]> memory;
    WorkRef work;
  };

  void stream() {
    Stream stream(&speaker_);
    speaker_.again();
    peer_.add(stream.path);
    ++totals_.streams;
    const uint64_t length = 1 + speaker_.below(1000);
    bool whole = true;
    for (uint64_t n = 0; n < length && whole;) {
      bytes_.clear();
      for (const uint64_t end = std::min(length, n + 1 + speaker_.below(20)); n < end; ++n) {
        const Header header = speaker_.next(percent_);
        const auto* at = reinterpret_cast<const uint8_t*>(&header);
        bytes_.insert(bytes_.end(), at, at + sizeof header);
        bytes_.resize(bytes_.size() + std::min<uint64_t>(header.length, kPiece));
        ++totals_.frames;
      }
      if (percent_ > 0 && speaker_.chance(1)) bytes_.resize(speaker_.below(bytes_.size()));
      for (size_t at = 0; at < bytes_.size() && whole;) {  // read as the network cuts it
        const size_t part = std::min(bytes_.size() - at, 1 + speaker_.below(40000));
        whole = stream.feed(&bytes_[at], part, peer_);
        at += part;
        if (speaker_.chance(20)) act(stream);
      }
    }
    CHECK(whole || percent_ > 0);  // what is right is taken
    totals_.ended += !whole;
    peer_.failed(*stream.path, "it ends");
  }

  void act(Stream& stream) {
    stream.path->open = speaker_.chance(80);
    if (stream.path->open) peer_.roomy(*stream.path);
    if (receives_.size() < kReceives) {
      const uint64_t size = speaker_.below(kLargest);
      receives_.push_back({std::make_unique<uint8_t[]>(size), nullptr});
      Receive& one = receives_.back();
      const bool exact = speaker_.chance(10);
      one.work = peer_.receive(speaker_.below(Speaker::kTags), one.memory.get(), size, exact);
    } else {
      const auto one = receives_.begin() + speaker_.below(kReceives);
      if (speaker_.chance(20)) peer_.abort(one->work);
      if (one->work->done()) receives_.erase(one);
    }
    if (speaker_.chance(10)) peer_.tick(kNever, kNever);
    if (speaker_.chance(30)) {
      const uint64_t size = speaker_.below(3000);
      auto memory = Memory(new uint8_t[size + 1](), std::default_delete<uint8_t[]>());
      peer_.send(speaker_.below(Speaker::kTags), memory, size);
    }
  }

  const uint64_t before_ = allocated();
  Speaker speaker_;
  Totals& totals_;
  Peer peer_{"rank 1", kWindow};
  std::vector<Receive> receives_;
  std::vector<uint8_t> bytes_;
  const int percent_ = std::array{0, 1, 5, 30}[speaker_.below(4)];  // of frames
};

}  // namespace

int main(int argc, char** argv) {
  g_seed = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 1;
  const uint64_t frames = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 1000000;
  Totals totals;
  uint64_t after_first = 0;
  for (uint64_t n = 0; totals.frames < frames; ++n) {
    Victim(g_seed + 1000003 * n, totals).run(frames - totals.frames);
    if (n == 0) after_first = allocated();
    CHECK(allocated() < after_first + (1 << 20));
  }
  std::vector<uint8_t> noise(3000);
  Speaker speaker(g_seed, kPiece, kWindow);
  for (int n = 0; n < 200; ++n) {
    for (auto& one : noise) one = speaker.below(256);
    LLVMFuzzerTestOneInput(noise.data(), speaker.below(noise.size()));
  }
  std::printf("%lu frames in %lu streams from seed %lu: %lu ended by a frame, %lu messages came, "
              "a peer took %lu KiB at most\n",
              totals.frames, totals.streams, g_seed, totals.ended, totals.received,
              totals.most >> 10);
  return totals.ended > 0 && totals.received > 0 ? 0 : 1;
}

#endif
