// Who waits for whom: threads of the host for operations, operations for what is before them in a
// stream, in a hardware queue or by an event, and for keys, which operations or threads will signal.
// Each waits for all of these, so that any circle is a deadlock.
#include <algorithm>
#include <set>

#include "model.h"

namespace hostile {

namespace {

class Search {
 public:
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
        if (one.kind != Op::Kind::outside) return false;
        return through(words + ", which waits for \"" + one.key + "\" from", [&] { return key(one.key); });
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

  bool key(const std::string& name) {
    if (world().signalled.count(name) != 0) return false;
    const auto signaller = world().signallers.find(name);
    if (signaller != world().signallers.end()) return op(*signaller->second);
    const auto promised = world().promised.find(name);
    if (promised == world().promised.end()) return false;
    for (auto& one : world().threads) {
      if (one.name == promised->second && (one.blocked || !one.awaits.empty())) return thread(one);
    }
    return false;
  }

  std::set<const void*> seen_;
  std::vector<const void*> stack_;
};

}  // namespace

std::string circle(const Thread& from) {
  Search search;
  if (!search.thread(from)) return "";
  std::string text;
  for (auto& part : search.path) text += (text.empty() ? "" : " -> ") + part;
  return text;
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
