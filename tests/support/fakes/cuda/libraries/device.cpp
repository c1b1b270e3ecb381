#include "device.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <sys/prctl.h>
#include <thread>
#include <unordered_set>

#include "device_state.hpp"
#include "graphs.hpp"
#include "options.hpp"
#include "stall.hpp"

namespace fake_cuda {

State& state() {
  static State* made = [] {
    auto* s = new State;  // never destroyed: its threads run until the process is gone
    s->devices.resize((size_t)options().devices);
    for (auto& device : s->devices)
      for (int i = 0; i < options().queues; i++) device.queues.push_back(new Queue{i, {}});
    return s;
  }();
  return *made;
}

namespace {

constexpr double least_sleep = 100e-6;  // ops shorter than that are caught up with in one go
std::atomic<uint64_t> steps{0};

double seconds_until(double moment) { return moment - now(); }

bool has_passed(const After& a) { return a.stream->completed >= a.number; }

bool can_start(const Op& op) {
  if (op.stream->completed != op.number - 1 || op.stream->running) return false;
  if (!std::all_of(op.after.begin(), op.after.end(), has_passed)) return false;
  return op.kind != Kind::wait || op.passing->done;
}

void complete(Stream* s, uint64_t number, double time) {
  s->completed = number;
  s->completed_at = time;
  s->running = s->finishing = false;
  s->op = Op{};
  if (s->queue->holder == s) s->queue->holder = nullptr;
  steps++;
}

void start(State& all, Queue& queue) {
  Op op = std::move(queue.ops.front());
  queue.ops.pop_front();
  Stream* s = op.stream;
  double begin = std::max({op.launched, s->completed_at, queue.issued});
  for (const After& a : op.after) begin = std::max(begin, a.stream->completed_at);
  if (op.kind == Kind::wait) begin = std::max(begin, op.passing->time);
  queue.issued = begin;
  steps++;
  if (op.kind == Kind::wait) return complete(s, op.number, begin);
  if (op.kind == Kind::record) {
    op.passing->done = true;
    op.passing->time = begin;
    return complete(s, op.number, begin);
  }
  s->running = true;
  if (op.kind == Kind::copy && op.way != Way::within) {
    double& until = all.devices[(size_t)s->device].copies_until[(size_t)op.way];
    begin = until = std::max(begin, until);
    until += op.seconds;
  }
  s->end = begin + op.seconds;
  s->op = std::move(op);
  if (s->op.kind == Kind::network) {
    queue.holder = s;
    s->op.begin(s, s->op.number);
  } else if (s->op.kind == Kind::host_function) {
    all.host_functions.push_back(s);
    all.host_function_launched.notify_one();
  } else {
    all.running.push_back(s);
  }
}

// Runs what has come to its end, without the lock where bytes are moved. True if something did.
bool finish_due(State& all, Lock& lock, double time) {
  std::vector<Stream*> due;
  for (size_t i = 0; i < all.running.size();) {
    if (all.running[i]->end > time) {
      i++;
      continue;
    }
    due.push_back(all.running[i]);
    all.running[i] = all.running.back();
    all.running.pop_back();
  }
  // A busy machine has many due at once: those whose time was first, first.
  std::sort(due.begin(), due.end(), [](Stream* a, Stream* b) { return a->end < b->end; });
  for (Stream* s : due) {
    if (s->op.effect) {
      s->finishing = true;
      lock.unlock();
      s->op.effect();
      lock.lock();
    }
    complete(s, s->op.number, s->end);
  }
  return !due.empty();
}

// Whether the one op of a queue is over at once, as on a GPU: then nobody needs to be woken for it.
bool takes_no_time(const Queue& queue) {
  if (queue.ops.size() != 1 || queue.holder || !can_start(queue.ops.front())) return false;
  const Kind kind = queue.ops.front().kind;
  return kind == Kind::record || kind == Kind::wait;
}

bool all_idle(const State& all) {
  for (auto& device : all.devices)
    for (const Queue* queue : device.queues)
      if (!queue->ops.empty()) return false;
  return true;
}

bool start_ready(State& all) {
  bool any = false;
  for (auto& device : all.devices)
    for (Queue* queue : device.queues)
      while (!queue->ops.empty() && !queue->holder && can_start(queue->ops.front())) {
        start(all, *queue);
        any = true;
      }
  return any;
}

void play_devices() {
  prctl(PR_SET_NAME, "fake_gpu");
  prctl(PR_SET_TIMERSLACK, 1000);
  State& all = state();
  Lock lock(all.mutex);
  for (;;) {
    bool some = false, more = true;
    while (more) {
      more = start_ready(all);
      more |= finish_due(all, lock, now());
      some |= more;
    }
    if (some) all.progressed.notify_all();
    all.asked = false;
    if (all.running.empty()) {
      all.wakes_at = 1e300;
      all.work.wait(lock, [&] { return all.asked; });
      continue;
    }
    double next = 1e300;
    for (Stream* s : all.running) next = std::min(next, s->end);
    all.wakes_at = std::max(next, now() + least_sleep);
    const auto span = std::chrono::duration<double>(seconds_until(all.wakes_at));
    all.work.wait_for(lock, span, [&] { return all.asked; });
  }
}

void play_host_functions() {
  prctl(PR_SET_NAME, "fake_gpu_host");
  State& all = state();
  Lock lock(all.mutex);
  for (;;) {
    all.host_function_launched.wait(lock, [&] { return !all.host_functions.empty(); });
    Stream* s = all.host_functions.front();
    all.host_functions.pop_front();
    lock.unlock();
    s->op.effect();
    lock.lock();
    complete(s, s->op.number, now());
    wake(all, 0);
    all.progressed.notify_all();
  }
}

}  // namespace

void wake(State& all, double wanted) {
  if (all.asked || all.wakes_at <= wanted) return;
  all.asked = true;
  all.work.notify_one();
}

void progress() { steps++; }
uint64_t progress_count() { return steps; }

Stream* create_locked(State& all, int device, unsigned flags, int priority) {
  if (!all.threads_run) {
    all.threads_run = true;
    std::thread(play_devices).detach();
    std::thread(play_host_functions).detach();
    std::thread(watch_for_stalls).detach();
  }
  Device& of = all.devices[(size_t)device];
  Queue* queue = of.queues[of.turn++ % of.queues.size()];
  auto* s = new Stream{all.streams_made++, device, priority, !(flags & non_blocking), queue};
  of.streams.push_back(s);
  all.known.insert(s);
  return s;
}

Stream* create_stream(int device, unsigned flags, int priority) {
  State& all = state();
  Lock lock(all.mutex);
  return create_locked(all, device, flags, priority);
}

bool destroy_stream(Stream* s) {  // what it still has to do is done; its memory stays, for late events
  State& all = state();
  Lock lock(all.mutex);
  return all.known.erase(s) != 0;
}

bool known(void* handle) {
  State& all = state();
  Lock lock(all.mutex);
  return all.known.count((Stream*)handle) != 0;
}

Stream* stream_of(void* handle, int device) {
  State& all = state();
  Lock lock(all.mutex);
  if ((uintptr_t)handle > 2) return all.known.count((Stream*)handle) ? (Stream*)handle : nullptr;
  Device& of = all.devices[(size_t)device];
  if ((uintptr_t)handle == 2) {
    static thread_local std::map<int, Stream*> own;
    Stream*& s = own[device];
    if (!s) s = create_locked(all, device, 0, 0);
    return s;
  }
  if (!of.legacy) of.legacy = create_locked(all, device, non_blocking, 0);
  return of.legacy;
}

bool launch(Stream* s, Op op) {
  State& all = state();
  Lock lock(all.mutex);
  if (add_to_capture(s, op)) return false;
  if ((int)s->queue->ops.size() >= options().depth) {
    HostWait blocked("a launch", "a place in hardware queue " + std::to_string(s->queue->ordinal) + ", which is full");
    all.progressed.wait(lock, [&] { return (int)s->queue->ops.size() < options().depth; });
  }
  op.stream = s;
  op.number = ++s->launched;
  op.launched = now();
  if (op.kind == Kind::record) {
    op.passing->stream = s->ordinal;
    op.passing->number = op.number;
  }
  Device& of = all.devices[(size_t)s->device];
  if (s == of.legacy) {
    for (Stream* other : of.streams)
      if (other->blocking && other->completed < other->launched) op.after.push_back({other, other->launched});
  } else if (s->blocking && of.legacy && of.legacy->completed < of.legacy->launched) {
    op.after.push_back({of.legacy, of.legacy->launched});
  }
  const double wanted = op.launched + (op.kind == Kind::network ? 0 : least_sleep);
  Queue& queue = *s->queue;
  queue.ops.push_back(std::move(op));
  if (takes_no_time(queue)) {
    start(all, queue);
    all.progressed.notify_all();
    if (all_idle(all)) return true;
  }
  wake(all, wanted);
  return true;
}

void finish_network(Stream* s, uint64_t number, double time) {
  State& all = state();
  Lock lock(all.mutex);
  complete(s, number, time);
  wake(all, 0);
  all.progressed.notify_all();
}

bool passed(Stream* s) {
  Lock lock(state().mutex);
  return s->completed == s->launched;
}

bool passed(const std::shared_ptr<Passing>& p) {
  Lock lock(state().mutex);
  return !p || p->done;
}

}  // namespace fake_cuda
