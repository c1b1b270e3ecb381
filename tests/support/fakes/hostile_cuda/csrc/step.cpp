// How the device moves: which of the operations that may begin or end does so next is the seed's.
#include <algorithm>
#include <chrono>
#include <memory>
#include <set>
#include <thread>

#include "model.h"

namespace hostile {

namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;

constexpr auto kQuiet = std::chrono::microseconds(150);  // without a call, after which it moves
constexpr int kStubborn = 8;  // quiet moments after which it moves although calls go on
constexpr auto kPatience = std::chrono::seconds(60), kLong = std::chrono::seconds(3);
// Calls that may wait for all that a device has, as CUDA's documentation says, on any thread.
const std::set<std::string> kWaiting = {"cuMemHostAlloc", "cuMemFreeHost", "cuMemHostRegister",
                                        "cuMemHostUnregister"};
constexpr int kLaunchTimeout = 702;

std::unique_ptr<std::thread> driver;
bool stopping;

bool all_over(const Op& op) {
  return std::all_of(op.after.begin(), op.after.end(), [](auto& one) { return one->over(); });
}

bool may_end(const Op& op) {
  if (op.kind != Op::Kind::collective) return true;
  const auto& one = world().collectives.at(op.key);
  // Once a deadlock was found it is dissolved, so that the case can end.
  return world().failed || one.begun == one.members.size();
}

void end(const OpRef& op) {
  if (op->ends) op->ends();
  if (op->kind == Op::Kind::collective) --op->stream->device->collectives;
  op->state = Op::State::over;
  op->passed = now();
  op->begins = op->ends = nullptr;
  op->after.clear();
  if (op->stream->running == op) op->stream->running = nullptr;
  world().changed.notify_all();
}

void begin(Queue& queue) {
  const OpRef op = queue.waiting.front();
  queue.waiting.pop_front();
  op->state = Op::State::running;
  op->begun = now();
  if (op->begins) op->begins();
  if (op->kind == Op::Kind::record || op->kind == Op::Kind::wait) return end(op);
  op->stream->running = op;
  if (op->kind == Op::Kind::collective) {
    ++world().collectives.at(op->key).begun;
    world().work.notify_all();  // other devices' may end
    world().changed.notify_all();
  }
}

struct Move {
  Queue* begins;  // or
  OpRef ends;
  double weight;
};

std::vector<Move> moves(Device& device) {
  std::vector<Move> found;
  for (auto& queue : device.queues) {
    if (queue.waiting.empty()) continue;
    const Op& op = *queue.waiting.front();
    if (!op.stream->running && all_over(op)) found.push_back({&queue, nullptr, op.stream->weight});
  }
  for (auto& stream : device.streams) {
    if (stream.running && may_end(*stream.running)) {
      found.push_back({nullptr, stream.running, stream.weight});
    }
  }
  return found;
}

void drive() {
  Lock lock(world().mutex);
  this_thread().name = "the driver's";
  auto& work = world().work;
  const auto rest = [&] {
    if (look(false)) return;
    world().resting = true;
    const bool stirred = work.wait_for(lock, kLong) == std::cv_status::no_timeout;
    world().resting = false;
    if (!stirred) look(true);
  };
  std::vector<uint64_t> seen;
  for (int busy = 0; !stopping;) {
    bool can = false;
    for (auto& device : world().devices) can = can || !moves(device).empty();
    if (!can) {
      rest();
      continue;
    }
    seen.clear();
    for (auto& device : world().devices) seen.push_back(device.calls);
    work.wait_for(lock, kQuiet, [] { return stopping; });
    busy = (busy + 1) % kStubborn;
    for (size_t i = 0; i < world().devices.size() && i < seen.size(); ++i) {
      Device& device = world().devices[i];
      if (device.calls != seen[i] && busy != 0) continue;
      for (int n = 0; n < device.steps && step(device); ++n) {}
    }
  }
}

}  // namespace

bool step(Device& device) {
  const auto possible = moves(device);
  if (possible.empty()) return false;
  double all = 0;
  for (auto& move : possible) all += move.weight;
  double at = device.chance() * all;
  const Move* chosen = &possible.back();
  for (auto& move : possible) {
    if ((at -= move.weight) < 0) {
      chosen = &move;
      break;
    }
  }
  if (chosen->begins != nullptr) begin(*chosen->begins); else end(chosen->ends);
  return true;
}

void called(Lock& lock, Device& device, const char* call) {
  Thread& thread = this_thread();
  ++device.calls;
  ++thread.calls[call];
  if (device.pins_wait && kWaiting.count(call) != 0) {
    wait_for(lock, device, call);
  } else if (device.chance() < device.synchronises) {
    // A thread that launches has what it needs before what it launches, and so may wait for all of
    // that at any call. Another one has not: a training's collectives are launched meanwhile.
    if (thread.trains || device.collectives == 0 || kWaiting.count(call) != 0) {
      wait_for(lock, device, call);
    }
  } else if (device.chance() < device.moves) {
    for (int n = static_cast<int>(device.chance() * (device.steps + 1)); n > 0 && step(device);) --n;
  }
}

int wait_for(Lock& lock, Device& device, const char* call) {
  Thread& me = this_thread();
  const auto finished = [&] {
    for (auto& queue : device.queues) if (!queue.waiting.empty()) return false;
    for (auto& stream : device.streams) if (stream.running) return false;
    return true;
  };
  const auto until = steady_clock::now() + kPatience;
  int result = 0;
  while (!finished() && result == 0) {
    if (step(device)) continue;
    std::vector<OpRef> left;  // each of them keeps it
    for (auto& stream : device.streams) if (stream.running) left.push_back(stream.running);
    for (auto& queue : device.queues) if (!queue.waiting.empty()) left.push_back(queue.waiting.front());
    me.call = call;
    std::string found;
    for (auto& one : left) {
      me.blocked = one;
      if (found = circle(me); !found.empty()) break;
    }
    if (!found.empty()) {
      finding(std::string("deadlock: ") + found);
      world().failed = true;
      world().changed.notify_all();
      world().work.notify_all();
    }
    if (!found.empty()) {
      result = kLaunchTimeout;
    } else if (world().changed.wait_until(lock, until) == std::cv_status::timeout) {
      finding(std::string("stuck for 60 s: ") + me.name + " in " + call + "; " + all_waits());
      result = kLaunchTimeout;
    }
  }
  me.blocked = nullptr;
  me.call = "";
  return result;
}

void start_driver_thread() {
  stopping = false;
  driver = std::make_unique<std::thread>(drive);
}

void stop_driver_thread() {
  if (!driver) return;
  {
    Lock lock(world().mutex);
    stopping = true;
    world().work.notify_all();
  }
  driver->join();
  driver.reset();
}

}  // namespace hostile
