#include "core/peer.h"

#include <algorithm>

namespace adaptra {

namespace {
constexpr uint64_t kWords = 4 * kMost;  // control frames that wait: more than a correct peer can cause
}

Peer::Peer(std::string name, uint64_t window, Note note, Memory blank)
    : name(std::move(name)),
      window_(window),
      note_(std::move(note)),
      blank_(blank ? std::move(blank)
                   : Memory(new uint8_t[kProbe](), std::default_delete<uint8_t[]>())) {}

void Peer::add(std::shared_ptr<Path> path) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!closed_.empty()) {  // the other side must not wait for what will never come
    Header bye;
    bye.kind = Kind::Bye;
    send_over(*path, bye, nullptr, nullptr);
    path->flush();
    return path->close();
  }
  paths_.push_back(std::move(path));
  counts_.paths = paths_.size();
  probe(*paths_.back());
  enqueue(Kind::Alive);
  pump();
}

void Peer::close(const std::string& why) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!closed_.empty()) return;
  pump();
  Header bye;
  bye.kind = Kind::Bye;
  const Ranges haves = haves_;
  for (auto& path : paths_) {  // over each: its end alone would look like a failure
    haves_ = haves;  // what is here has not failed
    send_haves(*path);
    if (path->takes()) send_over(*path, bye, nullptr, nullptr);
  }
  flush();
  closed_ = why;
  for (auto& path : paths_) path->close();  // before memory goes that they may read
  settle(lock);
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
  control_.clear();
  ready_.clear();
  asking_.clear();
}

void Peer::tick(Nanoseconds beat, Nanoseconds silence) {
  std::vector<std::shared_ptr<Path>> silent;
  const Nanoseconds time = now();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& path : paths_) {
      if (path->silent() && path->last_received + silence < time) silent.push_back(path);
      answer(*path);
      probe(*path);
      if (path->last_sent + beat > time || !path->takes()) continue;
      Header header;
      header.taken = reported_ = taken_;
      send_over(*path, header, nullptr, nullptr);
    }
    soon_ = haves_.pieces() > 0;
    pump();
  }
  for (auto& path : silent) {
    path->fail("no frame arrived for " + std::to_string((time - path->last_received) / 1000000) + " ms");
  }
}

Peer::Counts Peer::counts() const {
  std::lock_guard<std::mutex> lock(mutex_);
  Counts counts = counts_;
  counts.kept = kept_;
  counts.trials = std::count_if(paths_.begin(), paths_.end(),
                                [](const auto& path) { return path->order >= kTrial; });
  return counts;
}

bool Peer::arrived(Path& path, const Header& header) {
  path.last_received = now();
  std::unique_lock<std::mutex> lock(mutex_);
  if (!closed_.empty()) return true;
  if (header.taken > spent_) return false;
  returned_ = std::max(returned_, header.taken);
  bool back = false;
  switch (header.kind) {
    case Kind::Data:
      if (!arrived_data(header)) return false;
      break;
    case Kind::Ask: {
      if (finished_.holds(header.number, header.number + 1)) {
        acknowledge(header.number, true);
        break;
      }
      if (crowded() && !in_.count(header.number)) return false;
      Incoming& in = incoming(header);
      if (in.total != header.total || in.tag != header.tag) return false;
      in.asked = true;
      in.eager = in.eager || (header.flags & kEager);
      in.soon = in.soon || (header.flags & kSoon);
      if (!in.receive) {
        match(header.tag);
      } else if (!in.eager) {
        enqueue(Kind::Grant, header.number);
      }
      break;
    }
    case Kind::Grant: {
      auto out = out_.find(header.number);
      if (out != out_.end() && out->second.asks) {
        out->second.asks = false;
        queue(out->second);
      }
      break;
    }
    case Kind::Have:
      for (auto at = out_.lower_bound(header.number);
           at != out_.end() && at->first - header.number < header.total; at = out_.erase(at)) {
        auto of_tag = of_tag_.find(at->second.tag);
        if (--of_tag->second.under_way == 0) of_tag_.erase(of_tag);
        at->second.work->stamps.completed = now();
        at->second.work->end();
      }
      break;
    case Kind::Alive:
      break;
    case Kind::Bye:
      left_ = name + " has closed its engine";
      leave(lock);
      break;
    case Kind::Lost:
      for (auto& [number, out] : out_) enqueue(Kind::Ask, number);
      break;
    case Kind::Probe:
      path.owed = header.number;
      answer(path);
      break;
    case Kind::Probed:
      back = carried(path, header.number);
      break;
    case Kind::Slots:
      return false;  // no path passes it on
  }
  use_credit();
  pump();
  const bool fine = control_.size() + haves_.pieces() <= kWords;
  lock.unlock();
  if (back && note_) note_(&path, "");
  return fine;
}

void Peer::roomy(Path&) {
  std::lock_guard<std::mutex> lock(mutex_);
  pump();
}

void Peer::failed(Path& path, const std::string& why) {
  if (lost(path) && note_) note_(&path, why);
}

// The peer will neither send nor take anything any more. What other paths still bring of a message
// is not written to memory whose receive has ended.
void Peer::leave(std::unique_lock<std::mutex>& lock) {
  std::vector<WorkRef> over;
  for (auto& [number, out] : out_) over.push_back(out.work);
  for (auto& [tag, receives] : posted_) {
    for (auto& receive : receives) over.push_back(receive->work);
  }
  for (auto& [number, in] : in_) {
    if (!in.receive || in.complete) continue;
    over.push_back(in.receive->work);
    drop(in);
  }
  out_.clear();
  of_tag_.clear();
  ready_.clear();
  asking_.clear();
  posted_.clear();
  settle(lock);
  for (auto& work : over) work->end(left_);
}

void Peer::settle(std::unique_lock<std::mutex>& lock) {
  written_.wait(lock, [this] {
    return std::all_of(in_.begin(), in_.end(), [](auto& one) { return one.second.writers == 0; });
  });
}

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
    enqueue(Kind::Ask, number);  // a word about it may be lost, too
  }
  enqueue(Kind::Lost);  // so are words that were answers
  pump();
  return true;
}

}  // namespace adaptra
