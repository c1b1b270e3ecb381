// Messages over paths that delay, fail and come back: each arrives once, in the order of its tag.
// test_peer [FIRST_SEED [COUNT]]: one simulated job per seed.
#include <array>
#include <random>

#include "check.h"
#include "core/peer.h"

using namespace adaptra;

constexpr Nanoseconds kNever = 1ull << 60;

struct Frame {
  Header header;
  std::vector<uint8_t> payload;
};

// One end of a path; the driver moves frames from its queue to the other end's peer.
struct End : Path {
  End(int order, uint64_t piece, size_t room) : Path(order, piece), room(room) {}
  bool takes() const override { return frames.size() < room; }
  uint64_t waiting() const override { return frames.size(); }
  Nanoseconds due(uint64_t) const override { return (frames.size() + 1) * frame_takes; }
  Nanoseconds guess(uint64_t) const override { return (frames.size() + 1) * frame_may_take; }
  void send(const Header& header, const uint8_t* payload, std::shared_ptr<void>) override {
    CHECK(takes());
    if (cut) return;
    frames.push_back({header, {payload, payload + header.length}});
  }
  void close() override {}
  void fail(const std::string&) override {}
  const size_t room;
  bool cut = false;
  Nanoseconds frame_takes = 0, frame_may_take = 0;  // 0: not known
  std::deque<Frame> frames;
};

struct Link {
  std::shared_ptr<End> ends[2];
  bool gone[2] = {false, false};
};

struct Job {
  explicit Job(unsigned long seed) : random(seed) {}

  uint64_t below(uint64_t most) { return random() % most; }
  bool chance(int percent) { return below(100) < static_cast<uint64_t>(percent); }

  void connect() {
    Link link;
    const int order = (chance(70) ? 0 : 1) + (chance(30) ? kTrial : 0);
    const uint64_t piece = 50 + below(300);
    const size_t room = 1 + below(5);
    for (int side = 0; side < 2; ++side) {
      link.ends[side] = std::make_shared<End>(order, piece, room);
      link.ends[side]->frame_takes = below(3) * below(10000000);
      link.ends[side]->frame_may_take = below(10000000);
    }
    links.push_back(link);
    for (int side = 0; side < 2; ++side) peers[side]->add(links.back().ends[side]);
  }

  void lose(Link& link) {  // frames under way are lost, and the ends learn of it one by one
    for (auto& end : link.ends) {
      end->cut = true;
      while (!end->frames.empty() && chance(50)) end->frames.pop_back();
    }
  }

  void deliver(Link& link, int side) {
    End& from = *link.ends[side];
    if (from.frames.empty() || link.gone[1 - side]) return;
    Frame frame = std::move(from.frames.front());
    from.frames.pop_front();
    Peer& peer = *peers[1 - side];
    CHECK(fault_of(frame.header, from.longest_piece).empty());
    if (frame.header.length > 0) {
      const uint64_t half = frame.header.length / 2;
      const std::pair<uint64_t, uint64_t> reads[] = {{0, half}, {half, frame.header.length}};
      for (auto [done, end] : reads) {
        peer.fill(frame.header, done, [&, done = done, end = end](uint8_t* to) -> ssize_t {
          if (to != nullptr) std::copy(&frame.payload[done], &frame.payload[0] + end, to);
          return end - done;
        });
        if (done == 0 && chance(50)) between();
      }
    }
    CHECK(peer.arrived(*link.ends[1 - side], frame.header));
    if (!link.gone[side]) peers[side]->roomy(from);
  }

  struct Sent {
    std::vector<uint8_t> bytes;
    WorkRef work;
  };
  struct Received {
    std::vector<uint8_t> memory;
    WorkRef work;
    bool aborted = false;
    uint64_t here = 0;  // bytes, as was reported
  };

  void run() {
    constexpr int kTags = 4;
    std::deque<Sent> sent[2][kTags];          // by sender
    std::deque<Received> received[2][kTags];  // by sender, too
    for (int n = 0; n < 3; ++n) connect();
    const int messages = 60;
    int left = messages, steps = 0;
    std::vector<uint64_t> sizes[2][kTags];
    bool ending = false;
    auto post = [&](bool yes) {
      const int side = below(2), tag = below(kTags);
      auto& receives = received[side][tag];
      if (!yes || receives.size() == sizes[side][tag].size()) return;
      receives.emplace_back();
      Received& one = receives.back();
      one.memory.resize(sizes[side][tag][receives.size() - 1] + 1);
      // What is reported to be here is, and stays: it may be read from then on.
      const uint64_t step = 1 + below(500);
      const auto& whole = sent[side][tag][receives.size() - 1].bytes;
      const auto come = [&, step](uint64_t here) {
        CHECK(here >= one.here + step && here < whole.size());
        CHECK(std::equal(whole.begin(), whole.begin() + here, one.memory.begin()));
        one.here = here;
        ++reports;
      };
      one.work = peers[1 - side]->receive(tag, one.memory.data(), one.memory.size() - 1, true,
                                          {step, come});
    };
    between = [&] { post(true); };
    while (true) {
      CHECK(++steps < 2000000);
      ending = ending || left == 0;
      if (left > 0 && chance(20)) {
        const int side = below(2), tag = below(kTags);
        const uint64_t size = chance(10) ? 0 : below(chance(20) ? 3000 : 400);
        --left;
        Sent one;
        for (uint64_t n = 0; n < size; ++n) one.bytes.push_back(random());
        auto memory = std::shared_ptr<uint8_t>(new uint8_t[size + 1], std::default_delete<uint8_t[]>());
        std::copy(one.bytes.begin(), one.bytes.end(), memory.get());
        one.work = peers[side]->send(tag, memory, size);
        sizes[side][tag].push_back(size);
        sent[side][tag].push_back(std::move(one));
      }
      post(chance(ending ? 50 : 10));
      if (chance(5)) {  // without it nobody is in haste to say what is here
        auto& some = sent[below(2)][below(kTags)];
        if (!some.empty()) some[below(some.size())].work->wait(0);
      }
      if (chance(2)) peers[below(2)]->tick(kNever, kNever);
      if (!links.empty()) {
        Link& link = links[below(links.size())];
        deliver(link, below(2));
        if (left > 0 && chance(1)) lose(link);  // then each has to recover from the last one
      }
      for (size_t n = 0; n < links.size(); ++n) {
        Link& link = links[n];
        if (!link.ends[0]->cut || !chance(20)) continue;
        const int end = below(2);
        if (!link.gone[end]) {
          link.gone[end] = true;
          peers[end]->failed(*link.ends[end], "cut");
        }
        if (link.gone[0] && link.gone[1]) {
          links.erase(links.begin() + n);
          break;
        }
      }
      if (links.size() < 3 && chance(10)) connect();
      bool all = left == 0;
      for (int s = 0; s < 2 && all; ++s) {
        for (int t = 0; t < kTags && all; ++t) {
          all = received[s][t].size() == sent[s][t].size();
          for (auto& one : sent[s][t]) all = all && one.work->done();
          for (auto& one : received[s][t]) all = all && one.work->done();
        }
      }
      if (all) break;
    }
    for (int s = 0; s < 2; ++s) {
      for (int t = 0; t < kTags; ++t) {
        for (size_t n = 0; n < sent[s][t].size(); ++n) {
          auto& one = received[s][t][n];
          CHECK(one.work->error().empty() && sent[s][t][n].work->error().empty());
          one.memory.pop_back();
          CHECK(one.memory == sent[s][t][n].bytes);
          CHECK(one.work->stamps.sent <= one.work->stamps.completed);
        }
      }
      CHECK(peers[s]->counts().kept == 0);
      again += peers[s]->counts().again;
      twice += peers[s]->counts().twice;
    }
  }

  std::function<void()> between = [] {};  // what happens while a piece is half here
  std::mt19937_64 random;
  const uint64_t window = chance(50) ? 1500 : 100000;  // else nearly all messages ask
  std::shared_ptr<Peer> peers[2] = {std::make_shared<Peer>("rank 0", window),
                                    std::make_shared<Peer>("rank 1", window)};
  std::vector<Link> links;
  uint64_t again = 0, twice = 0, reports = 0;
};

// The word that the other side closes overtakes the rest of a message.
void leaving() {
  Peer peer("rank 1", 1500);
  auto path = std::make_shared<End>(0, 100, 10);
  auto memory = std::make_unique<uint8_t[]>(20);
  const auto work = peer.receive(5, memory.get(), 20);
  const auto half = [&](uint64_t offset) {
    Header header;
    header.kind = Kind::Data;
    header.number = 1;
    header.tag = 5;
    header.total = 20;
    header.offset = offset;
    header.length = 10;
    bool wanted = false;
    peer.fill(header, 0, [&](uint8_t* to) -> ssize_t {
      wanted = to != nullptr;
      return 10;
    });
    CHECK(peer.arrived(*path, header));
    return wanted;
  };
  CHECK(half(0));
  Header bye;
  bye.kind = Kind::Bye;
  CHECK(peer.arrived(*path, bye));
  CHECK(work->error() == "rank 1 has closed its engine");
  memory.reset();
  CHECK(!half(10));
}

// Two paths, of which the second came back; a hole loses what is large there, and nothing else.
void trial(bool hole) {
  constexpr int kPiece = 100, kTicks = 200, kFew = 7;
  int carried[2] = {0, 0};
  const auto note = [&](int side) {
    return [&, side](const Path*, const std::string& why) { carried[side] += why.empty(); };
  };
  const std::shared_ptr<Peer> peers[2] = {std::make_shared<Peer>("rank 1", 1500, note(0)),
                                          std::make_shared<Peer>("rank 0", 1500, note(1))};
  std::shared_ptr<End> ends[2][2];  // by side, by path
  for (int side = 0; side < 2; ++side) {
    for (int path = 0; path < 2; ++path) {
      ends[side][path] = std::make_shared<End>(path * kTrial, kPiece, 10);
      peers[side]->add(ends[side][path]);
    }
  }
  uint64_t moved = 0;  // messages over the path on trial
  const auto deliver = [&](int from, int path) {
    auto& frames = ends[from][path]->frames;
    while (!frames.empty()) {
      const Frame frame = std::move(frames.front());
      frames.pop_front();
      moved += path == 1 && frame.header.kind == Kind::Data;
      if (path == 1 && hole && frame.header.length > 0) continue;
      peers[1 - from]->fill(frame.header, 0, [&](uint8_t* to) -> ssize_t {
        if (to != nullptr) std::copy(frame.payload.begin(), frame.payload.end(), to);
        return frame.payload.size();
      });
      CHECK(peers[1 - from]->arrived(*ends[1 - from][path], frame.header));
    }
  };
  const auto exchange = [&] {
    auto memory = Memory(new uint8_t[kPiece](), std::default_delete<uint8_t[]>());
    uint8_t here[kPiece];
    const auto got = peers[1]->receive(5, here, kPiece);
    const auto first = peers[0]->send(5, memory, kPiece), second = peers[0]->send(6, memory, kPiece);
    const auto got_too = peers[1]->receive(6, here, kPiece);
    CHECK(!first->wait(0) && !second->wait(0));  // else nobody is in haste to say what is here
    for (int turn = 0; turn < 4; ++turn) {
      for (int path = 0; path < 2; ++path) deliver(turn % 2, path);
    }
    CHECK(got->done() && got_too->done() && first->done() && second->done());
  };
  for (int ticks = 0; ticks < kTicks; ++ticks) {
    for (auto& peer : peers) peer->tick(kNever, kNever);
    CHECK(hole || ticks >= kFew || moved == 0);
    exchange();
  }
  for (int side = 0; side < 2; ++side) {
    CHECK(peers[side]->counts().trials == hole);
    CHECK(carried[side] == !hole);
  }
  CHECK((moved == 0) == hole);
  if (!hole) return;
  hole = false;  // and where nothing else is left it is used
  for (int side = 0; side < 2; ++side) peers[side]->failed(*ends[side][0], "cut");
  exchange();
  CHECK(moved > 0);
}

// Where 66 pieces go, over two paths of the lowest order, one of the next and one on trial.
std::array<size_t, 4> shares(Nanoseconds first, Nanoseconds second, Nanoseconds next) {
  constexpr uint64_t kPiece = 100, kPieces = 66;
  auto peer = std::make_shared<Peer>("the other", 1 << 20);
  std::shared_ptr<End> ends[4];
  for (int n = 0; n < 4; ++n) {
    ends[n] = std::make_shared<End>(n < 2 ? 0 : n == 2 ? 1 : 1 + kTrial, kPiece, 1000);
    peer->add(ends[n]);
  }
  for (auto& end : ends) end->frames.clear();
  ends[0]->frame_takes = first;
  ends[1]->frame_takes = second;
  ends[2]->frame_may_take = ends[3]->frame_may_take = next;
  peer->send(1, Memory(new uint8_t[kPieces * kPiece](), std::default_delete<uint8_t[]>()), kPieces * kPiece);
  std::array<size_t, 4> found;
  std::transform(ends, ends + 4, found.begin(), [](const auto& end) { return end->frames.size(); });
  peer->close("over");
  return found;
}

void slow_paths() {
  using Shares = std::array<size_t, 4>;
  constexpr Nanoseconds kMicro = 1000, kMilli = 1000000;
  CHECK((shares(0, 0, 1) == Shares{33, 33, 0, 0}));           // by what waits,
  CHECK((shares(kMicro, 10 * kMicro, 1) == Shares{33, 33, 0, 0}));  // as long as all are fast;
  CHECK((shares(30 * kMilli, 300 * kMilli, 30000 * kMilli) == Shares{60, 6, 0, 0}));  // by what they take,
  CHECK((shares(30 * kMilli, 30 * kMilli, 3 * kMilli) == Shares{5, 5, 56, 0}));  // the next one, too;
  CHECK((shares(30 * kMilli, 0, kMilli) == Shares{0, 66, 0, 0}));  // what has carried nothing is tried
}

int main(int argc, char** argv) {
  const unsigned long first = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 1;
  const unsigned long count = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 300;
  uint64_t again = 0, twice = 0, reports = 0;
  leaving();
  slow_paths();
  trial(true);
  trial(false);
  for (g_seed = first; g_seed < first + count; ++g_seed) {
    Job job(g_seed);
    job.run();
    again += job.again;
    twice += job.twice;
    reports += job.reports;
  }
  std::printf("%lu jobs from seed %lu: %lu pieces went again, %lu frames came twice, %lu times a part of "
              "a message was there\n",
              count, first, again, twice, reports);
  return again > 0 && twice > 0 && reports > 0 ? 0 : 1;
}
