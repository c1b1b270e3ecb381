// A peer of the job that asks for too much loses its path, and makes this side keep little.
#include <functional>

#include "check.h"
#include "core/peer.h"
#include "memory.h"

using namespace adaptra;

namespace {

constexpr uint64_t kWindow = 1 << 20;
constexpr uint64_t kFew = 64 << 20;   // bytes: what all limits together allow
constexpr uint64_t kEndless = 600000;

struct End : Path {
  End() : Path(0, 1 << 20) {}
  bool takes() const override { return open; }
  uint64_t waiting() const override { return 0; }
  void send(const Header&, const uint8_t*, std::shared_ptr<void>) override {}
  void close() override {}
  void fail(const std::string&) override {}
  bool open = true;
};

Header data(uint64_t number, Tag tag, uint64_t total, uint64_t offset, uint32_t length) {
  Header header;
  header.kind = Kind::Data;
  header.flags = kEager;
  header.number = number;
  header.tag = tag;
  header.total = total;
  header.offset = offset;
  header.length = length;
  return header;
}

Header ask(uint64_t number, Tag tag, uint64_t total) {
  Header header = data(number, tag, total, 0, 0);
  header.kind = Kind::Ask;
  return header;
}

struct Side {
  Side() { peer.add(path); }
  // Whether a frame is taken.
  bool says(const Header& header) {
    CHECK(fault_of(header, path->longest_piece).empty());
    if (header.length > 0) {
      peer.fill(header, 0, [&](uint8_t* to) -> ssize_t {
        if (to != nullptr) std::memset(to, 1, header.length);
        return header.length;
      });
    }
    return peer.arrived(*path, header);
  }
  const std::shared_ptr<End> path = std::make_shared<End>();
  Peer peer{"rank 1", kWindow};
};

// After how many frames the path ends; they are as `frame` says.
uint64_t ends_after(Side& side, const std::function<Header(uint64_t)>& frame) {
  const uint64_t before = allocated();
  uint64_t count = 0;
  while (count < kEndless && side.says(frame(count))) ++count;
  CHECK(allocated() < before + kFew);
  CHECK(side.peer.counts().kept <= kWindow);
  return count;
}

void asks_of_endless_messages() {
  Side side;
  const auto endless = [](uint64_t n) { return ask(n + 1, n, kLongest); };
  CHECK(ends_after(side, endless) == kMost + kWindow / kCost);
}

void more_than_there_is_credit_for() {
  Side empty, large, announced, early;
  CHECK(ends_after(empty, [](uint64_t n) { return data(n + 1, n, 0, 0, 0); }) == kWindow / kCost);
  CHECK(ends_after(large, [](uint64_t n) { return data(n + 1, 1, 99744, 0, 1); }) == 10);
  CHECK(announced.says(ask(1, 1, kLongest)) && !announced.says(data(1, 1, kLongest, 0, 1)));
  uint8_t byte;  // a receive is posted, but for another message than this one
  early.peer.receive(1, &byte, 1);
  Header later = data(9, 1, kLongest, 0, 1);
  later.before = 5;
  CHECK(!early.says(later));
  Header generous;
  generous.taken = 1;
  CHECK(!early.says(generous));
}

void one_byte_here_and_one_there() {
  Side side;
  std::vector<uint8_t> memory(8 << 20);
  side.peer.receive(1, memory.data(), memory.size());
  CHECK(side.says(ask(1, 1, memory.size())));
  const auto scattered = [&](uint64_t n) { return data(1, 1, memory.size(), 2 * n, 1); };
  CHECK(ends_after(side, scattered) == kStretches + memory.size() / kStretch);
}

void messages_that_come_by_twos() {
  Side side;
  const auto skipping = [&](uint64_t n) {
    for (uint64_t m = 0; m < n % 2 * 2; ++m) side.peer.receive(1, nullptr, 0);  // early and late
    return data(2 * n + 2, 1, 0, 0, 0);
  };
  CHECK(ends_after(side, skipping) == kMost + 1);
}

void answers_that_nobody_reads() {
  Side side;
  side.path->open = false;
  side.peer.receive(1, nullptr, 0);
  CHECK(side.says(data(1, 1, 0, 0, 0)));
  const auto same = [](uint64_t) { return ask(1, 1, 0); };
  CHECK(ends_after(side, same) == kEndless);  // one answer to all
  const auto unread = [&](uint64_t n) {
    side.peer.receive(1, nullptr, 0);
    return data(n + 2, 1, 0, 0, 0);
  };
  CHECK(ends_after(side, unread) == kEndless);  // and one to many in a row
  side.path->open = true;
  side.peer.roomy(*side.path);
  side.path->open = false;
  const auto scattered = [](uint64_t n) { return ask(2 * n + 1, 1, 0); };
  CHECK(ends_after(side, scattered) == 4 * kMost);
}

// Their memory goes with the receive that did not fit, or was given up.
void beginnings_of_messages() {
  Side side;
  const uint64_t before = allocated();
  std::vector<uint8_t> memory(900000);
  for (uint64_t n = 1; n <= 2000; ++n) {
    CHECK(side.says(data(n, 1, memory.size(), 0, 100)));
    const auto work = side.peer.receive(1, memory.data(), n % 2 ? 5 : memory.size());
    CHECK(work->done() == (n % 2 == 1));
    side.peer.abort(work);
  }
  CHECK(allocated() < before + kFew);
  CHECK(side.peer.counts().kept == 0);
}

void sends_without_end() {
  Side side;
  const auto memory = Memory(new uint8_t[1], std::default_delete<uint8_t[]>());
  for (uint64_t n = 0; n < kMost; ++n) CHECK(!side.peer.send(n, memory, 1)->done());
  const auto work = side.peer.send(0, memory, 1);
  CHECK(work->done() && work->error().find("65536 messages to rank 1 are under way") == 0);
  Header have;
  have.kind = Kind::Have;
  have.number = 1;
  have.total = 1;
  CHECK(side.says(have) && !side.peer.send(0, memory, 1)->done());
}

}  // namespace

int main() {
  asks_of_endless_messages();
  more_than_there_is_credit_for();
  one_byte_here_and_one_there();
  messages_that_come_by_twos();
  answers_that_nobody_reads();
  beginnings_of_messages();
  sends_without_end();
}
