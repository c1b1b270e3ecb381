// The half of a peer that sends.
//
// A message starts at once if there is credit for it; else it asks, and starts when the other side
// grants it or gives credit back. It takes turns with others in `ready_`, a piece at a time, on the
// path that `best` finds. All that is sent goes through `pump`, which runs whenever something is to be
// sent or a path takes frames again.
#include "core/peer.h"

#include <algorithm>

namespace adaptra {

namespace {
constexpr Nanoseconds kLate = 20000000;  // RDMA that takes longer for a piece is over a slow link
}

WorkRef Peer::send(Tag tag, Memory memory, uint64_t bytes, Nanoseconds sent) {
  uint64_t number = 0;
  auto work = begin(tag, std::move(memory), bytes, sent, &number);
  filled(number, bytes);
  return work;
}

WorkRef Peer::begin(Tag tag, Memory memory, uint64_t bytes, Nanoseconds sent, uint64_t* number) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto work = std::make_shared<Work>([peer = weak_from_this(), number = last_ + 1] {
    if (auto self = peer.lock()) self->ask(number);
  });
  work->stamps.sent = sent == 0 ? now() : sent;
  if (!closed_.empty() || !left_.empty()) {
    work->end(closed_.empty() ? left_ : closed_);
    return work;
  }
  if (out_.size() == kMost) {
    work->end(std::to_string(kMost) + " messages to " + name +
              " are under way, and none more may be: wait for some of them");
    return work;
  }
  Outgoing& out = out_[*number = ++last_];
  out.number = last_;
  out.total = bytes;
  out.tag = tag;
  out.memory = std::move(memory);
  out.work = work;
  OfTag& of_tag = of_tag_[tag];
  out.before = of_tag.last;
  of_tag.last = last_;
  ++of_tag.under_way;
  if (window_ - (spent_ - returned_) >= cost(bytes)) {
    spent_ += cost(bytes);
  } else {
    out.asks = true;
    out.eager = false;
    asking_.push_back(out.number);
    enqueue(Kind::Ask, out.number);
  }
  pump();
  return work;
}

void Peer::filled(uint64_t number, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto at = out_.find(number);
  if (at == out_.end()) return;  // it has failed: the connection was closed
  at->second.filled = bytes;
  if (!at->second.asks) queue(at->second);
  pump();
}

uint8_t Peer::flags(const Outgoing& out) {
  return (out.eager ? kEager : 0) | (out.soon ? kSoon : 0);
}

void Peer::send_piece(Path& path, Outgoing& out) {
  Header header;
  header.kind = Kind::Data;
  header.flags = flags(out);
  header.number = out.number;
  header.before = out.before;
  header.total = out.total;
  header.tag = out.tag;
  header.sent = out.work->stamps.sent;
  header.taken = reported_ = taken_;
  uint64_t left;
  if (!out.again.empty()) {
    auto& [offset, length] = out.again.front();
    header.offset = offset;
    left = std::min(length, path.longest_piece);
    offset += left;
    length -= left;
    if (length == 0) out.again.pop_front();
  } else {
    if (!out.started) {
      out.started = true;
      out.work->stamps.left = now();
      ++counts_.sent;
    }
    header.offset = out.next;
    left = std::min(out.filled - out.next, path.longest_piece);
    out.next += left;
  }
  header.length = static_cast<uint32_t>(left);
  counts_.bytes_sent += left;
  out.pieces.push_back({header.offset, left, &path});
  send_over(path, header, out.memory.get() + header.offset, out.memory);
}

bool Peer::has_more(const Outgoing& out) {
  return out.next < out.filled || !out.again.empty() || (out.total == 0 && !out.started);
}

void Peer::queue(Outgoing& out) {
  if (out.queued || !has_more(out)) return;
  out.queued = true;
  ready_.push_back(out.number);
}

void Peer::use_credit() {
  while (!asking_.empty()) {
    auto at = out_.find(asking_.front());
    if (at != out_.end() && at->second.asks) {
      Outgoing& out = at->second;
      if (window_ - (spent_ - returned_) < cost(out.total)) return;
      spent_ += cost(out.total);
      out.asks = false;
      out.eager = true;
      queue(out);
    }
    asking_.pop_front();
  }
}

void Peer::send_control(Path& path, Kind kind, uint64_t number) {
  Header header;
  header.kind = kind;
  header.number = number;
  if (kind == Kind::Ask) {
    auto at = out_.find(number);
    if (at == out_.end()) return;  // it has arrived meanwhile
    const Outgoing& out = at->second;
    header.flags = flags(out);
    header.before = out.before;
    header.total = out.total;
    header.tag = out.tag;
    header.sent = out.work->stamps.sent;
  }
  header.taken = reported_ = taken_;
  send_over(path, header, nullptr, nullptr);
}

void Peer::ask(uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto at = out_.find(number);
  // Large messages are acknowledged at once in any case.
  if (at == out_.end() || at->second.soon || at->second.total >= kHaveBytes) return;
  at->second.soon = true;
  enqueue(Kind::Ask, number);
  pump();
}

void Peer::send_haves(Path& path) {
  while (haves_.pieces() > 0 && path.takes()) {
    const auto [begin, end] = haves_.pop();
    Header header;
    header.kind = Kind::Have;
    header.number = begin;
    header.total = end - begin;
    header.taken = reported_ = taken_;
    send_over(path, header, nullptr, nullptr);
  }
  if (haves_.pieces() > 0) return;
  soon_ = false;
  more_haves_ = have_bytes_ = 0;
}

void Peer::enqueue(Kind kind, uint64_t number) { control_.emplace(kind, number); }

Path* Peer::best(uint64_t bytes) const {
  int order = INT32_MAX;
  for (const auto& path : paths_) order = std::min(order, path->order.load());
  Path* best = nullptr;
  Nanoseconds latest = 0;
  for (const auto& path : paths_) {
    if (path->order != order) continue;
    latest = std::max(latest, path->due(std::min(bytes, path->longest_piece)));
    if (!path->takes()) continue;
    if (best == nullptr || path->waiting() < best->waiting()) best = path.get();
  }
  if (latest <= kLate) return best;
  Nanoseconds soonest = 0;
  best = nullptr;
  for (const auto& path : paths_) {
    if (path->order != order && path->order >= kTrial) continue;
    const uint64_t piece = std::min(bytes, path->longest_piece);
    const Nanoseconds known = path->due(piece), due = known > 0 ? known : path->guess(piece);
    if (best != nullptr && due >= soonest) continue;
    best = path.get();
    soonest = due;
  }
  return best->takes() ? best : nullptr;  // what would be there later on another path waits for it
}

uint64_t Peer::next_bytes() const {
  if (!control_.empty() || ready_.empty()) return 0;
  auto at = out_.find(ready_.front());
  if (at == out_.end()) return 0;
  const Outgoing& out = at->second;
  return out.again.empty() ? out.filled - out.next : out.again.front().second;
}

void Peer::send_over(Path& path, const Header& header, const uint8_t* payload,
                     std::shared_ptr<void> keep) {
  path.last_sent = now();
  unflushed_ = unflushed_ || header.length == 0;
  path.send(header, payload, std::move(keep));
}

void Peer::flush() {
  if (!unflushed_) return;
  unflushed_ = false;
  for (auto& path : paths_) path->flush();
}

void Peer::pump() {
  while (!control_.empty() || !ready_.empty() || soon_) {
    Path* path = best(next_bytes());
    if (path == nullptr) break;
    send_haves(*path);
    if (!path->takes()) continue;
    if (!control_.empty()) {
      const auto [kind, about] = *control_.begin();
      control_.erase(control_.begin());
      send_control(*path, kind, about);
      continue;
    }
    if (ready_.empty()) break;
    const uint64_t number = ready_.front();
    ready_.pop_front();
    auto at = out_.find(number);
    if (at == out_.end()) continue;  // it has arrived, over another path
    Outgoing& out = at->second;
    send_piece(*path, out);
    out.queued = false;
    queue(out);
  }
  flush();
}

}  // namespace adaptra
