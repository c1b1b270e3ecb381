#include "peer.h"

#include <algorithm>

namespace adaptra {

namespace {
constexpr uint64_t kTellEvery = 8;  // credit is given back in parts of the window, at least so many
}

Peer::Peer(std::string name, uint64_t window, Note note)
    : name(std::move(name)), window_(window), note_(std::move(note)) {}

WorkRef Peer::send(Tag tag, Memory memory, uint64_t bytes, Nanoseconds sent) {
  uint64_t number = 0;
  auto work = begin(tag, std::move(memory), bytes, sent, &number);
  filled(number, bytes);
  return work;
}

void Peer::filled(uint64_t number, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto at = out_.find(number);
  if (at == out_.end()) return;  // the peer is lost
  at->second.filled = bytes;
  if (!at->second.asks) queue(at->second);
  pump();
}

WorkRef Peer::begin(Tag tag, Memory memory, uint64_t bytes, Nanoseconds sent, uint64_t* number) {
  auto work = std::make_shared<Work>();
  work->stamps.sent = sent == 0 ? now() : sent;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!closed_.empty() || !left_.empty()) {
    work->end(closed_.empty() ? left_ : closed_);
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
    say(Kind::Ask, out.number);
  }
  pump();
  return work;
}

WorkRef Peer::receive(Tag tag, uint8_t* memory, uint64_t bytes, bool exact) {
  auto work = std::make_shared<Work>();
  work->stamps.posted = now();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!closed_.empty()) {
    work->end(closed_);
    return work;
  }
  posted_[tag].push_back(std::make_shared<Receive>(Receive{memory, bytes, exact, work}));
  match(tag);
  if (!left_.empty()) leave();
  pump();
  return work;
}

void Peer::abort(const WorkRef& work) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (auto of_tag = posted_.begin(); of_tag != posted_.end(); ++of_tag) {
    auto& queue = of_tag->second;
    auto at = std::find_if(queue.begin(), queue.end(),
                           [&](const auto& receive) { return receive->work == work; });
    if (at != queue.end()) {
      queue.erase(at);
      if (queue.empty()) posted_.erase(of_tag);
      break;
    }
  }
  for (auto& [number, in] : in_) {
    if (in.receive && in.receive->work == work) {
      in.dropped = true;
      in.receive.reset();
      const uint64_t which = number;
      written_.wait(lock, [&] {
        auto at = in_.find(which);
        return at == in_.end() || at->second.writers == 0;
      });
      break;
    }
  }
  work->end("aborted");
}

void Peer::add(std::shared_ptr<Path> path) {
  std::lock_guard<std::mutex> lock(mutex_);
  paths_.push_back(std::move(path));
  counts_.paths = paths_.size();
  say(Kind::Alive);
  pump();
}

void Peer::close(const std::string& why) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!closed_.empty()) return;
  say(Kind::Bye);
  pump();
  closed_ = why;
  for (auto& path : paths_) path->close();  // before memory goes that they may read
  written_.wait(lock, [this] {
    return std::all_of(in_.begin(), in_.end(), [](auto& one) { return one.second.writers == 0; });
  });
  for (auto& [number, out] : out_) out.work->end(why);
  for (auto& [number, in] : in_) {
    if (in.receive) in.receive->work->end(why);
  }
  for (auto& [tag, receives] : posted_) {
    for (auto& receive : receives) receive->work->end(why);
  }
  out_.clear();
  in_.clear();
  posted_.clear();
  unmatched_.clear();
  of_tag_.clear();
  control_.clear();  // with the word that this side closes, if no path takes it
  ready_.clear();
  asking_.clear();
}

void Peer::tick(Nanoseconds beat, Nanoseconds silence) {
  std::vector<std::shared_ptr<Path>> silent;
  const Nanoseconds time = now();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& path : paths_) {
      if (path->silent() && path->heard + silence < time) silent.push_back(path);
      if (path->said + beat > time || !path->takes()) continue;
      Header header;
      header.taken = told_ = taken_;
      send_over(*path, header, nullptr, nullptr);
    }
  }
  for (auto& path : silent) {
    path->fail("nothing was heard for " + std::to_string((time - path->heard) / 1000000) + " ms");
  }
}

void Peer::promote(int path, int order) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& known : paths_) {
    if (known->id == path) known->order = order;
  }
  pump();
}

void Peer::send_over(Path& path, const Header& header, const uint8_t* payload,
                     std::shared_ptr<void> keep) {
  path.said = now();
  path.send(header, payload, std::move(keep));
}

Peer::Counts Peer::counts() const {
  std::lock_guard<std::mutex> lock(mutex_);
  Counts counts = counts_;
  counts.kept = kept_;
  return counts;
}

ssize_t Peer::fill(const Header& header, uint64_t done,
                   const std::function<ssize_t(uint8_t*)>& write) {
  std::unique_lock<std::mutex> lock(mutex_);
  uint8_t* target = closed_.empty() && wanted(header) ? place(header) : nullptr;
  if (target == nullptr) {
    lock.unlock();
    return write(nullptr);
  }
  Incoming& in = in_.at(header.number);  // it stays while somebody writes
  ++in.writers;
  lock.unlock();
  const ssize_t result = write(target + header.offset + done);
  lock.lock();
  if (--in.writers == 0) {
    written_.notify_all();
    deliver_if_over(in);
  }
  return result;
}

uint8_t* Peer::place(const Header& header) {
  Incoming& in = incoming(header);
  if (in.dropped) return nullptr;
  if (in.target == nullptr) {
    if (in.receive) {
      in.target = in.receive->memory;
    } else {
      in.own.reset(new uint8_t[in.total + 1]);  // never of nothing: then there is a place
      in.target = in.own.get();
      kept_ += cost(in.total);
    }
  }
  return in.target;
}

// Whether a piece brings anything. What there is no room for is not wanted either, and ends the
// path when it is there: the other side keeps to its credit.
bool Peer::wanted(const Header& header) {
  if (finished_.holds(header.number, header.number + 1)) return false;
  auto known = in_.find(header.number);
  if (known == in_.end()) return kept_ + cost(header.total) <= window_ || posted_.count(header.tag);
  const Incoming& in = known->second;
  return in.total == header.total && in.tag == header.tag &&
         !in.here.holds(header.offset, header.offset + header.length);
}

bool Peer::arrived(Path& path, const Header& header) {
  path.heard = now();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!closed_.empty()) return true;
  if (header.taken > spent_) return false;
  returned_ = std::max(returned_, header.taken);
  auto out = out_.find(header.number);
  switch (header.kind) {
    case Kind::Data:
      if (!arrived_data(header)) return false;
      break;
    case Kind::Ask: {
      if (finished_.holds(header.number, header.number + 1)) {
        say(Kind::Have, header.number);
        break;
      }
      Incoming& in = incoming(header);
      if (in.total != header.total || in.tag != header.tag) return false;
      in.asked = true;
      if (in.receive) {
        say(Kind::Grant, header.number);
      } else {
        match(header.tag);
      }
      break;
    }
    case Kind::Grant:
      if (out != out_.end() && out->second.asks) {
        out->second.asks = false;
        queue(out->second);
      }
      break;
    case Kind::Have:
      if (out != out_.end()) {
        auto of_tag = of_tag_.find(out->second.tag);
        if (--of_tag->second.under_way == 0) of_tag_.erase(of_tag);
        out->second.work->stamps.completed = now();
        out->second.work->end();
        out_.erase(out);
      }
      break;
    case Kind::Alive:
      break;
    case Kind::Bye:
      left_ = name + " has closed its engine";
      leave();
      break;
  }
  use_credit();
  pump();
  return true;
}

bool Peer::arrived_data(const Header& header) {
  if (finished_.holds(header.number, header.number + 1)) {
    ++counts_.twice;
    say(Kind::Have, header.number);  // the first one was lost
    return true;
  }
  auto known = in_.find(header.number);
  if (header.total == 0 && known == in_.end() && wanted(header)) {
    place(header);
    known = in_.find(header.number);
  }
  if (known == in_.end()) return false;  // there was no credit for it
  Incoming& in = known->second;
  if (in.total != header.total || in.tag != header.tag) return false;
  in.eager = in.eager || header.eager;
  in.sent = header.sent;
  const uint64_t fresh = in.here.add(header.offset, header.offset + header.length);
  counts_.twice += fresh == 0 && header.length > 0;
  in.bytes += fresh;
  counts_.bytes_received += fresh;
  if (in.bytes == in.total && !in.complete) {
    in.complete = true;
    in.completed = now();
    finished_.add(in.number, in.number + 1);
    ++counts_.received;
    say(Kind::Have, in.number);
  }
  const Tag tag = in.tag;
  deliver_if_over(in);
  match(tag);
  return true;
}

Peer::Incoming& Peer::incoming(const Header& header) {
  auto known = in_.find(header.number);
  if (known != in_.end()) return known->second;
  Incoming& in = in_[header.number];
  in.number = header.number;
  in.before = header.before;
  in.total = header.total;
  in.tag = header.tag;
  in.sent = header.sent;
  unmatched_[in.tag][in.number] = &in;
  match(in.tag);
  return in;
}

// Whether every earlier message of its tag has been seen, and has its receive.
bool Peer::first_of_tag(const Incoming& in) const {
  return in.before == 0 || in_.count(in.before) || finished_.holds(in.before, in.before + 1);
}

void Peer::match(Tag tag) {
  for (;;) {
    auto receives = posted_.find(tag);
    auto messages = unmatched_.find(tag);
    if (receives == posted_.end() || messages == unmatched_.end()) return;
    Incoming& in = *messages->second.begin()->second;
    if (!first_of_tag(in)) return;
    auto receive = receives->second.front();
    receives->second.pop_front();
    if (receives->second.empty()) posted_.erase(receives);
    messages->second.erase(in.number);
    if (messages->second.empty()) unmatched_.erase(messages);
    give(in, std::move(receive));
  }
}

void Peer::give(Incoming& in, std::shared_ptr<Receive> receive) {
  if (receive->exact ? receive->bytes != in.total : receive->bytes < in.total) {
    receive->work->end("awaited a message of " + std::to_string(receive->bytes) +
                       " bytes, and one of " + std::to_string(in.total) + " came");
    in.dropped = true;
  } else {
    in.receive = std::move(receive);
  }
  if (in.own) kept_ -= cost(in.total);  // not without a receive any more
  if (in.asked && !in.complete) say(Kind::Grant, in.number);
  deliver_if_over(in);
}

// A path that fails may still be writing, what another one has brought meanwhile.
void Peer::deliver_if_over(Incoming& in) {
  if (in.complete && in.writers == 0 && (in.receive || in.dropped)) deliver(in);
}

void Peer::deliver(Incoming& in) {
  if (in.receive) {
    if (in.own) std::memcpy(in.receive->memory, in.own.get(), in.total);
    Stamps& stamps = in.receive->work->stamps;
    stamps.sent = in.sent;
    stamps.completed = in.completed;
    in.receive->work->end();
  }
  if (in.eager) {
    taken_ += cost(in.total);
    if (taken_ - told_ > window_ / kTellEvery) say(Kind::Alive);
  }
  in_.erase(in.number);
}

void Peer::roomy(Path&) {
  std::lock_guard<std::mutex> lock(mutex_);
  pump();
}

void Peer::failed(Path& path, const std::string& why) {
  if (lost(path) && note_) note_(&path, why);
}

// The peer will neither send nor take anything any more.
void Peer::leave() {
  for (auto& [number, out] : out_) out.work->end(left_);
  for (auto& [tag, receives] : posted_) {
    for (auto& receive : receives) receive->work->end(left_);
  }
  for (auto& [number, in] : in_) {
    if (in.receive && !in.complete) in.receive->work->end(left_);
  }
  out_.clear();
  of_tag_.clear();
  ready_.clear();
  asking_.clear();
  posted_.clear();
}

// Take a path out; what it may have lost goes again. Whether that matters to anybody.
bool Peer::lost(Path& path) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto at = std::find_if(paths_.begin(), paths_.end(),
                         [&](const auto& known) { return known.get() == &path; });
  if (at == paths_.end()) return false;
  paths_.erase(at);
  counts_.paths = paths_.size();
  if (!closed_.empty() || !left_.empty()) return false;
  for (auto& [number, out] : out_) {
    auto lost = std::stable_partition(out.pieces.begin(), out.pieces.end(),
                                      [&](const Piece& piece) { return piece.path != &path; });
    for (auto piece = lost; piece != out.pieces.end(); ++piece) {
      out.again.emplace_back(piece->offset, piece->length);
      ++counts_.again;
    }
    out.pieces.erase(lost, out.pieces.end());
    if (!out.asks) queue(out);
    say(Kind::Ask, number);  // a word about it may be lost, too
  }
  say(Kind::Alive);
  pump();
  return true;
}

// Of the paths that work and have the best order, the one that takes a frame and has least to do.
Path* Peer::best() const {
  int order = INT32_MAX;
  for (const auto& path : paths_) order = std::min(order, path->order.load());
  Path* best = nullptr;
  for (const auto& path : paths_) {
    if (path->order != order || !path->takes()) continue;
    if (best == nullptr || path->waiting() < best->waiting()) best = path.get();
  }
  return best;
}

void Peer::pump() {
  while (!control_.empty() || !ready_.empty()) {
    Path* path = best();
    if (path == nullptr) return;
    if (!control_.empty()) {
      Header header = control_.front();
      control_.pop_front();
      header.taken = told_ = taken_;
      send_over(*path, header, nullptr, nullptr);
      continue;
    }
    const uint64_t number = ready_.front();
    ready_.pop_front();
    auto at = out_.find(number);
    if (at == out_.end()) continue;  // it has arrived, over another path
    Outgoing& out = at->second;
    send_piece(*path, out);
    out.queued = false;
    queue(out);
  }
}

void Peer::send_piece(Path& path, Outgoing& out) {
  Header header;
  header.kind = Kind::Data;
  header.eager = out.eager;
  header.number = out.number;
  header.before = out.before;
  header.total = out.total;
  header.tag = out.tag;
  header.sent = out.work->stamps.sent;
  header.taken = told_ = taken_;
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

void Peer::say(Kind kind, uint64_t number) {
  Header header;
  header.kind = kind;
  header.number = number;
  if (kind == Kind::Ask) {
    const Outgoing& out = out_.at(number);
    header.before = out.before;
    header.total = out.total;
    header.tag = out.tag;
    header.sent = out.work->stamps.sent;
  }
  control_.push_back(header);
}

// Whether it has something to send now. A message of nothing has one piece, too.
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

}  // namespace adaptra
