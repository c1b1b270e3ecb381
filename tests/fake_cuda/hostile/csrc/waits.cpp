// Who waits for whom: threads of the host for operations, operations for what is before them in a
// stream, in a hardware queue or by an event, and for keys, which threads have promised to signal.
#include <set>

#include "model.h"

namespace hostile {

namespace {

class Search {
 public:
  explicit Search(const Thread& from) : from_(from) {}

  bool thread(const Thread& one) {
    if (!seen_.insert(&one).second) return &one == &from_;
    std::string doing = "the thread " + one.name;
    if (one.blocked) doing += " is in " + std::string(one.call) + ", which waits for";
    if (!one.awaits.empty()) doing += " waits for \"" + one.awaits + "\", for which it needs";
    path.push_back(doing);
    if (one.blocked && op(*one.blocked)) return true;
    if (!one.awaits.empty() && key(one.awaits)) return true;
    path.pop_back();
    return false;
  }

 private:
  bool op(const Op& one) {
    if (one.over() || !seen_.insert(&one).second) return false;
    const auto through = [&](const Op& next, const std::string& why) {
      path.push_back(in_words(one) + ", " + why);
      if (op(next)) return true;
      path.pop_back();
      return false;
    };
    if (one.state == Op::State::running) {
      if (one.kind != Op::Kind::outside) return false;
      path.push_back(in_words(one) + ", which waits for \"" + one.key + "\" from");
      if (key(one.key)) return true;
      path.pop_back();
      return false;
    }
    const auto& running = one.stream->running;
    if (running && through(*running, "which follows on its stream after")) return true;
    for (auto& earlier : one.after) if (through(*earlier, "which an event keeps behind")) return true;
    const Queue& queue = one.stream->device->queues[one.stream->queue];
    const Op& front = *queue.waiting.front();
    if (&front == &one) return false;
    const bool same = front.stream == one.stream;
    return through(front, same ? "which follows on its stream after"
                               : "which stands in hardware queue " +
                                     std::to_string(one.stream->queue) + " behind");
  }

  bool key(const std::string& name) {
    const auto promised = world().promised.find(name);
    if (promised == world().promised.end()) return false;
    for (auto& one : world().threads) {
      if (one.name == promised->second && (one.blocked || !one.awaits.empty())) return thread(one);
    }
    return false;
  }

  const Thread& from_;
  std::set<const void*> seen_;

 public:
  std::vector<std::string> path;
};

}  // namespace

std::string circle(const Thread& from) {
  Search search(from);
  if (!search.thread(from)) return "";
  std::string text;
  for (auto& part : search.path) text += part + " -> ";
  return text + "the thread " + from.name;
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
