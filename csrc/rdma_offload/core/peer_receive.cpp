// The half of a peer that receives.
//
// A path that has a frame with payload calls `fill`, which has it written to the receive's memory, or
// to memory of ours while no receive is posted, and then `arrived`, which comes to `arrived_data`.
// `match` gives messages to receives, tag by tag, in the order in which they were sent. A message that
// is complete, has its receive and has no path writing to it ends in `deliver`.
#include "core/peer.h"

#include <algorithm>

namespace adaptra {

namespace {
constexpr uint64_t kReportEvery = 8;  // credit is given back once it is more than this part of the window
constexpr uint64_t kHaves = 16;  // so many messages that are not acknowledged yet are acknowledged at once
}

WorkRef Peer::receive(Tag tag, uint8_t* memory, uint64_t bytes, bool exact, Progress progress) {
  auto work = std::make_shared<Work>();
  work->stamps.posted = now();
  std::unique_lock<std::mutex> lock(mutex_);
  if (!closed_.empty()) {
    work->end(closed_);
    return work;
  }
  posted_[tag].push_back(
      std::make_shared<Receive>(Receive{memory, bytes, exact, work, std::move(progress)}));
  match(tag);
  if (!left_.empty()) leave(lock);
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
      drop(in);
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

ssize_t Peer::fill(const Header& header, uint64_t done,
                   const std::function<ssize_t(uint8_t*)>& write) {
  std::unique_lock<std::mutex> lock(mutex_);
  uint8_t* target = closed_.empty() && wanted(header) ? place(header) : nullptr;
  if (target == nullptr) {
    lock.unlock();
    return write(nullptr);
  }
  Incoming& in = in_.at(header.number);  // it stays while a path writes
  ++in.writers;
  lock.unlock();
  const ssize_t result = write(target + header.offset + done);
  lock.lock();
  if (result > 0) in.reach = std::max(in.reach, header.offset + done + result);
  if (--in.writers == 0) {
    written_.notify_all();
    if (in.dropped) in.own.reset();
    move(in);
    report(in);
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
    } else if (kept_ + cost(in.total) <= window_) {
      in.own.reset(new uint8_t[in.total + 1]);  // an empty message has a target, too
      in.target = in.own.get();
      kept_ += cost(in.total);
    }
  }
  return in.target;
}

// A piece is also not wanted if there is no room for it. Then `arrived_data` fails the path, since a
// correct peer never sends more than it has credit for, nor more messages than may be under way.
bool Peer::wanted(const Header& header) {
  if (header.kind != Kind::Data) return false;
  if (finished_.holds(header.number, header.number + 1)) return false;
  auto known = in_.find(header.number);
  if (known == in_.end()) return kept_ + cost(header.total) <= window_ && !crowded();
  const Incoming& in = known->second;
  return in.total == header.total && in.tag == header.tag &&
         !in.here.holds(header.offset, header.offset + header.length);
}

bool Peer::arrived_data(const Header& header) {
  if (finished_.holds(header.number, header.number + 1)) {
    ++counts_.twice;
    acknowledge(header.number, true);  // the first acknowledgement was lost
    return true;
  }
  auto known = in_.find(header.number);
  if (header.total == 0 && known == in_.end() && wanted(header)) {
    place(header);
    known = in_.find(header.number);
  }
  if (known == in_.end()) return false;  // the peer had no credit for it
  Incoming& in = known->second;
  if (in.total != header.total || in.tag != header.tag) return false;
  if (header.length > 0 && in.target == nullptr && !in.dropped) return false;  // nor for its bytes
  in.eager = in.eager || (header.flags & kEager);
  in.soon = in.soon || (header.flags & kSoon);
  in.sent = header.sent;
  const uint64_t fresh = in.here.add(header.offset, header.offset + header.length);
  counts_.twice += fresh == 0 && header.length > 0;
  in.bytes += fresh;
  counts_.bytes_received += fresh;
  if (in.here.pieces() > kStretches + in.total / kStretch) return false;
  if (in.bytes == in.total && !in.complete) {
    in.complete = true;
    in.completed = now();
    finished_.add(in.number, in.number + 1);
    if (finished_.pieces() > kMost + 1) return false;
    ++counts_.received;
    have_bytes_ += in.total;
    acknowledge(in.number, in.soon || ++more_haves_ == kHaves || have_bytes_ >= kHaveBytes);
  }
  const Tag tag = in.tag;
  report(in);
  deliver_if_over(in);
  match(tag);
  return true;
}

void Peer::acknowledge(uint64_t number, bool soon) {
  haves_.add(number, number + 1);
  soon_ = soon_ || soon;
}

bool Peer::crowded() const { return in_.size() >= kMost + window_ / kCost; }

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
  } else {
    in.receive = std::move(receive);
  }
  if (in.own) kept_ -= cost(in.total);  // which counts messages without a receive
  if (!in.receive) drop(in);
  move(in);
  report(in);
  if (in.asked && !in.eager && !in.complete) enqueue(Kind::Grant, in.number);
  deliver_if_over(in);
}

void Peer::drop(Incoming& in) {
  in.dropped = true;
  in.receive.reset();
  if (in.writers == 0) in.own.reset();
}

// All of a message of which nothing is still to come is copied when it is delivered. A path may have
// written a part of a frame, of which `here` knows nothing yet.
void Peer::move(Incoming& in) {
  if (!in.own || !in.receive || in.complete || in.writers > 0) return;
  if (in.reach > 0) std::memcpy(in.receive->memory, in.own.get(), in.reach);
  in.own.reset();
  in.target = in.receive->memory;
}

// What a path is writing again stands still once no path writes: nothing of it is reported before.
void Peer::report(Incoming& in) {
  if (!in.receive || !in.receive->progress.come || in.complete || in.writers > 0) return;
  if (in.target != in.receive->memory) return;  // nothing came, or all of it
  const uint64_t here = in.here.prefix();
  if (here - in.reported < in.receive->progress.step) return;
  in.reported = here;
  in.receive->progress.come(here);
}

// A path that fails may still be writing a piece that another path has brought meanwhile.
void Peer::deliver_if_over(Incoming& in) {
  if (in.complete && in.writers == 0 && (in.receive || in.dropped)) deliver(in);
}

void Peer::deliver(Incoming& in) {
  if (in.receive) {
    if (in.own && in.total > 0) std::memcpy(in.receive->memory, in.own.get(), in.total);
    Stamps& stamps = in.receive->work->stamps;
    stamps.sent = in.sent;
    stamps.completed = in.completed;
    in.receive->work->end();
  }
  if (in.eager) {
    taken_ += cost(in.total);
    if (taken_ - reported_ > window_ / kReportEvery) enqueue(Kind::Alive);
  }
  in_.erase(in.number);
}

}  // namespace adaptra
