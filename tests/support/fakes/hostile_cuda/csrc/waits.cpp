// Who waits for whom: threads of the host for operations, operations for what is before them in a
// stream, in a hardware queue or by an event, and for messages, which threads will send.
// Each waits for all of these, so that any circle is a deadlock.
#include <algorithm>
#include <set>

#include "model.h"

namespace hostile {

namespace {

class Search {
 public:
  explicit Search(bool long_since = false) : long_since_(long_since) {}

  std::vector<std::string> path;  // in words, to the end of the circle

  bool thread(const Thread& one) {
    std::string doing = "the thread " + one.name;
    if (one.blocked) doing += " is in " + std::string(one.call) + ", which waits for";
    if (!one.awaits.empty()) doing += " waits for \"" + one.awaits + "\" from";
    return visit(&one, "the thread " + one.name, [&] {
      return (one.blocked && through(doing, [&] { return op(*one.blocked); })) ||
             (!one.awaits.empty() && through(doing, [&] { return key(one.awaits); }));
    });
  }

 private:
  template <typename F>
  bool through(const std::string& words, F next) {
    path.push_back(words);
    if (next()) return true;
    path.pop_back();
    return false;
  }

  template <typename F>
  bool visit(const void* node, const std::string& words, F next) {
    if (std::find(stack_.begin(), stack_.end(), node) != stack_.end()) {
      path.push_back(words);
      return true;
    }
    if (!seen_.insert(node).second) return false;
    stack_.push_back(node);
    const bool found = next();
    stack_.pop_back();
    return found;
  }

  bool op(const Op& one) {
    if (one.over()) return false;
    const auto words = in_words(one);
    return visit(&one, words, [&] {
      if (one.state == Op::State::running) {
        return one.kind == Op::Kind::collective && collective(one, words);
      }
      const auto behind = [&](const Op& next, const std::string& why) {
        return through(words + ", which " + why, [&] { return op(next); });
      };
      const auto& running = one.stream->running;
      if (running && behind(*running, "follows on its stream after")) return true;
      for (auto& earlier : one.after) if (behind(*earlier, "an event keeps behind")) return true;
      const Queue& queue = one.stream->device->queues[one.stream->queue];
      const Op& front = *queue.waiting.front();
      if (&front == &one) return false;
      if (front.stream == one.stream) return behind(front, "follows on its stream after");
      return behind(front, "stands in hardware queue " + std::to_string(one.stream->queue) + " behind");
    });
  }

  // Of those that have not begun: what stands on a device, or the thread that is to launch it.
  bool collective(const Op& one, const std::string& words) {
    const Collective& all = world().collectives.at(one.key);
    for (auto& member : all.members) {
      const auto launched = all.launched.find(member);
      const std::string says = words + ", which waits for " + member + "'s part";
      if (launched != all.launched.end()) {
        const Op& part = *launched->second;
        if (part.state == Op::State::queued && through(says, [&] { return op(part); })) return true;
      } else if (through(says, [&] { return promised(member); })) {
        return true;
      }
    }
    return false;
  }

  bool promised(const std::string& name) {
    for (auto& one : world().threads) {
      if (one.name == name && (one.blocked || !one.awaits.empty())) return thread(one);
    }
    return false;
  }

  // By its copy, and by the thread that sends it on, which may be blocked.
  bool sent(const Op& copy) {
    if (!copy.over()) return op(copy);
    if (!long_since_) return false;
    for (auto& one : world().threads) {
      if (one.trains || !one.blocked || one.blocked->stream->device != copy.stream->device) continue;
      if (through(in_words(copy) + ", which is over and not sent on by", [&] { return thread(one); })) {
        return true;
      }
    }
    return false;
  }

  bool key(const std::string& name) {
    const auto sent = world().sent.find(name);
    if (sent != world().sent.end()) return sent->second && this->sent(*sent->second);
    const auto by = world().promised.find(name);
    return by != world().promised.end() && promised(by->second);
  }

  const bool long_since_;
  std::set<const void*> seen_;
  std::vector<const void*> stack_;
};

}  // namespace

std::string circle(const Thread& from, bool long_since) {
  Search search(long_since);
  if (!search.thread(from)) return "";
  std::string text;
  for (auto& part : search.path) text += (text.empty() ? "" : " -> ") + part;
  return text;
}

bool look(bool long_since) {
  if (world().failed || world().collectives.empty()) return false;
  for (auto& one : world().threads) {
    if (one.awaits.empty()) continue;
    const std::string found = circle(one, long_since);
    if (found.empty()) continue;
    finding("deadlock: " + found);
    world().failed = true;
    world().changed.notify_all();
    return true;
  }
  return false;
}

std::string all_waits() {
  std::string text;
  for (auto& one : world().threads) {
    if (one.blocked) text += one.name + " in " + one.call + " for " + in_words(*one.blocked) + "; ";
    if (!one.awaits.empty()) text += one.name + " for \"" + one.awaits + "\"; ";
  }
  for (auto& device : world().devices) {
    for (auto& queue : device.queues) {
      if (queue.waiting.empty()) continue;
      text += "device " + std::to_string(device.ordinal) + ": " +
              std::to_string(queue.waiting.size()) + " behind " + in_words(*queue.waiting.front()) + "; ";
    }
    for (auto& stream : device.streams) {
      if (stream.running) text += in_words(*stream.running) + " runs; ";
    }
  }
  return text.empty() ? "nothing waits" : text;
}

}  // namespace hostile
