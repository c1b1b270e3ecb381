// Operations are issued: what is before each of them is known from then on.
#include <algorithm>

#include "memory.h"
#include "model.h"

namespace hostile {

World& world() {
  static World* one = new World;  // never destroyed: other threads may call until the very end
  return *one;
}

Nanoseconds now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Thread& this_thread() {
  thread_local Thread* mine = nullptr;
  if (mine == nullptr) {
    auto& threads = world().threads;
    threads.emplace_back();
    mine = &threads.back();
    mine->name = "host " + std::to_string(threads.size());
  }
  return *mine;
}

void finding(const std::string& text) {
  auto& all = world().findings;
  if (all.size() < 100 && std::find(all.begin(), all.end(), text) == all.end()) all.push_back(text);
}

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

std::string in_words(const Op& op) {
  return op.what + " on " + op.stream->name + " of device " +
         std::to_string(op.stream->device->ordinal);
}

OpRef issue(Stream& stream, Op op, const std::vector<Touch>& touches) {
  Device& device = *stream.device;
  op.stream = &stream;
  op.number = ++stream.count;
  op.clock = stream.clock;
  join(op.clock, device.host);
  // The legacy default stream and all blocking ones wait for each other.
  if (stream.number == 0) {
    for (auto& other : device.streams) {
      if (other.number != 0 && other.blocking && other.last) op.after.push_back(other.last);
    }
  } else if (stream.blocking && device.streams.front().last) {
    op.after.push_back(device.streams.front().last);
  }
  for (auto& one : op.after) join(op.clock, one->clock);
  op.after.erase(std::remove_if(op.after.begin(), op.after.end(),
                                [](auto& one) { return one->over(); }),
                 op.after.end());
  if (op.clock.size() <= stream.number) op.clock.resize(stream.number + 1);
  op.clock[stream.number] = op.number;
  stream.clock = op.clock;
  for (auto& touched : touches) touch(op, touched);
  const auto made = std::make_shared<Op>(std::move(op));
  stream.last = made;
  device.queues[stream.queue].waiting.push_back(made);
  if (world().resting) world().work.notify_all();
  return made;
}

void seen_over(Device& device, const Op& op) { join(device.host, op.clock); }

void seen_idle(Device& device) {
  for (auto& stream : device.streams) join(device.host, stream.clock);
}

Stream& add_stream(Device& device, bool blocking, const std::string& name) {
  static const double kWeights[] = {0.05, 0.3, 1, 1, 3};
  const size_t number = device.streams.size();
  device.streams.push_back({});
  Stream& made = device.streams.back();
  made.device = &device;
  made.number = number;
  made.name = name.empty() ? "stream " + std::to_string(number) : name;
  made.blocking = blocking;
  made.queue = number % device.queues.size();
  made.weight = kWeights[device.random() % 5];
  return made;
}

}  // namespace hostile
