// What tests ask of the hostile driver, beside CUDA's own calls.
#include <chrono>
#include <cstring>
#include <sstream>

#include "memory.h"
#include "model.h"

using namespace hostile;

namespace {

uint64_t scramble(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

uint64_t word(const uint8_t* at, size_t i) {
  uint64_t value;
  memcpy(&value, at + 8 * i, 8);
  return value;
}

size_t give(const std::string& text, char* out, size_t room) {
  if (room > text.size()) memcpy(out, text.c_str(), text.size() + 1);
  return text.size() + 1;
}

Device* device_at(int ordinal) {
  auto& all = world().devices;
  return ordinal >= 0 && ordinal < static_cast<int>(all.size()) ? &all[ordinal] : nullptr;
}

Stream& stream_at(int ordinal, void* handle) {
  Device& device = *device_at(ordinal);
  return handle == nullptr ? device.streams.front() : *static_cast<Stream*>(handle);
}

}  // namespace

#define TEST extern "C" __attribute__((visibility("default")))

// Begin a case. `waits`: whether calls may wait for all of a device.
TEST void hostile_open(int devices, int queues, uint64_t seed, int waits) {
  Lock lock(world().mutex);
  World& w = world();
  w.failed = false;
  w.lost.clear();
  w.findings.clear();
  w.promised.clear();
  w.collectives.clear();
  w.sending.clear();
  w.sent.clear();
  w.failing.clear();
  w.spans.clear();
  w.devices.clear();
  for (auto& thread : w.threads) {
    thread.calls.clear();
    thread.awaits.clear();
  }
  open_heaps(devices);
  static const double kMoves[] = {0.02, 0.2, 0.6, 0.95}, kSynchronises[] = {0, 0, 0.01, 0.05};
  static const int kSteps[] = {2, 4, 20};
  for (int i = 0; i < devices; ++i) {
    w.devices.emplace_back();
    Device& device = w.devices.back();
    device.ordinal = i;
    device.random.seed(scramble(seed) + i);
    device.queues.resize(queues);
    device.moves = kMoves[device.random() % 4];
    device.synchronises = kSynchronises[device.random() % 4] * waits;
    device.pins_wait = device.random() % 3 == 0 && waits != 0;
    device.steps = kSteps[device.random() % 3];
    device.drift = (device.chance() - 0.5) * 4e-6;
    add_stream(device, true, "the default stream").of_test = true;
  }
  lock.unlock();
  start_driver_thread();
}

// End it; what is still to run is dropped. No thread may wait any more.
TEST void hostile_close() {
  stop_driver_thread();
  Lock lock(world().mutex);
  for (auto& thread : world().threads) thread.device = nullptr;
  world().collectives.clear();
  world().sent.clear();
  world().devices.clear();
  close_heaps();
}

// This thread works with a device, under a name for findings; -1: with none.
TEST void hostile_enter(int ordinal, const char* name) {
  Lock lock(world().mutex);
  Thread& me = this_thread();
  me.device = device_at(ordinal);
  me.trains = true;
  me.name = name;
}

TEST void* hostile_stream(int ordinal, const char* name) {
  Lock lock(world().mutex);
  Stream& made = add_stream(*device_at(ordinal), false, name);
  made.of_test = true;
  return &made;
}

// As a caching allocator's: on the order of `stream`, of memory that was freed last where it fits.
TEST void* hostile_alloc(int ordinal, void* stream, size_t bytes, const char* label) {
  Lock lock(world().mutex);
  Device& device = *device_at(ordinal);
  return reinterpret_cast<void*>(allocate(device, stream_at(ordinal, stream), bytes, label).at);
}

TEST void hostile_free(void* at) {
  Lock lock(world().mutex);
  Block* block = block_of(at, 1);
  if (block == nullptr) return;  // the case is over
  if (block->live) give_back(*block, this_thread().name);
  else finding("freed: " + block->label + " is given back twice");
}

// Each word of an output is a mix of `id`, its place and the inputs' words there.
TEST void hostile_mix(uint64_t id, int inputs, const void** in, const size_t* in_bytes, int outputs,
                      void** out, const size_t* out_bytes) {
  std::vector<std::vector<uint64_t>> results;
  for (int k = 0; k < outputs; ++k) {
    results.emplace_back(out_bytes[k] / 8);
    for (size_t j = 0; j < results.back().size(); ++j) {
      uint64_t sum = scramble(scramble(id) + scramble(k) * 3 + j);
      for (int i = 0; i < inputs; ++i) {
        if (in_bytes[i] < 8) continue;
        sum += scramble(word(static_cast<const uint8_t*>(in[i]), j % (in_bytes[i] / 8)) + 7 * (i + 1));
      }
      results.back()[j] = sum;
    }
  }
  for (int k = 0; k < outputs; ++k) memcpy(out[k], results[k].data(), 8 * results[k].size());
}

// A kernel that mixes device memory.
TEST void hostile_kernel(int ordinal, void* stream, const char* label, uint64_t id, int inputs,
                         const void** in, const size_t* in_bytes, int outputs, void** out,
                         const size_t* out_bytes) {
  Lock lock(world().mutex);
  Device& device = *device_at(ordinal);
  called(lock, device, "a launch");
  std::vector<Touch> touches, sources, targets;
  for (int i = 0; i < inputs; ++i) sources.push_back({in[i], in_bytes[i], false});
  for (int k = 0; k < outputs; ++k) targets.push_back({out[k], out_bytes[k], true});
  touches = sources;
  touches.insert(touches.end(), targets.begin(), targets.end());
  Op op;
  op.kind = Op::Kind::kernel;
  op.what = "kernel " + std::string(label);
  op.begins = [=] {
    for (auto& target : targets) {
      bool also_read = false;
      for (auto& source : sources) also_read = also_read || source.at == target.at;
      if (!also_read) fill(target.at, target.bytes, Poison::running);
    }
  };
  const std::string name = label;
  auto shared = std::make_shared<std::weak_ptr<Op>>();
  op.ends = [=] {
    std::vector<const void*> from;
    std::vector<void*> to;
    std::vector<size_t> from_bytes, to_bytes;
    for (auto& source : sources) {
      const std::string bad = poison_in(source.at, source.bytes);
      if (!bad.empty()) finding("poison: kernel " + name + " reads " + bad);
      from.push_back(reach(source.at));
      from_bytes.push_back(source.bytes);
    }
    for (auto& target : targets) {
      to.push_back(reach(target.at));
      to_bytes.push_back(target.bytes);
    }
    hostile_mix(id, inputs, from.data(), from_bytes.data(), outputs, to.data(), to_bytes.data());
    if (const auto self = shared->lock()) {
      world().spans[{ordinal, name}] = {self->begun, now()};
    }
  };
  *shared = issue(stream_at(ordinal, stream), std::move(op), touches);
}

// When a kernel really ran last, in seconds of the monotonic clock; 0 if it has not.
TEST void hostile_span(int ordinal, const char* label, double* begun, double* ended) {
  Lock lock(world().mutex);
  const auto found = world().spans.find({ordinal, label});
  *begun = *ended = 0;
  if (found == world().spans.end()) return;
  *begun = found->second.first * 1e-9;
  *ended = found->second.second * 1e-9;
}

// What device memory holds at the end of all work: what a test does, no product.
TEST void hostile_read(void* to, const void* at, size_t bytes) {
  Lock lock(world().mutex);
  memcpy(to, reach(at), bytes);
}

// As cudaDeviceSynchronize.
TEST int hostile_synchronize(int ordinal) {
  Lock lock(world().mutex);
  Device& device = *device_at(ordinal);
  const int result = wait_for(lock, device, "a device-wide synchronisation");
  if (result == 0) seen_idle(device);
  return result;
}

// A part of a collective: it is over when all members' have begun. `members`: threads' names, with
// commas between; this thread's is one of them.
TEST void hostile_collective(int ordinal, void* stream, const char* key, const char* members) {
  Lock lock(world().mutex);
  Stream& on = stream_at(ordinal, stream);
  Collective& all = world().collectives[key];
  if (all.members.empty()) {
    std::stringstream names(members);
    for (std::string name; std::getline(names, name, ',');) all.members.push_back(name);
  }
  called(lock, *on.device, "a launch");
  Op op;
  op.kind = Op::Kind::collective;
  op.what = "collective " + std::string(key);
  op.key = key;
  ++on.device->collectives;
  world().collectives[key].launched[this_thread().name] = issue(on, std::move(op));
}

// A rank has failed: nobody waits for its part of a collective, as where NCCL's are aborted.
TEST void hostile_give_up() {
  Lock lock(world().mutex);
  world().failed = true;
  world().changed.notify_all();
  world().work.notify_all();
}

// The message `key` will be copied from `at`, by a copy to the host that is still to come.
TEST void hostile_sends(const char* key, const void* at) {
  Lock lock(world().mutex);
  world().sending[at] = key;
  world().sent[key] = nullptr;
}

// This thread waits for that message, elsewhere; an empty key: no more.
TEST void hostile_waiting(const char* key) {
  Lock lock(world().mutex);
  this_thread().awaits = key;
  if (*key != 0 && world().resting) world().work.notify_all();
}

// The thread of that name will send the message `key`.
TEST void hostile_promise(const char* key, const char* thread) {
  Lock lock(world().mutex);
  world().promised[key] = thread;
}

// Plant a fault: this call returns at once and waits for nothing, or says that all is over.
TEST void hostile_lose(const char* call) {
  Lock lock(world().mutex);
  world().lost = call;
}

// After `after` more of them all calls of this name fail with `code`; 0: none does.
TEST void hostile_fail(const char* call, int after, int code) {
  Lock lock(world().mutex);
  if (code == 0) world().failing.erase(call); else world().failing[call] = {after, code};
}

// What was wrong, a line each; both return the room that they need.
TEST size_t hostile_findings(char* out, size_t room) {
  Lock lock(world().mutex);
  std::string text;
  for (auto& one : world().findings) text += one + "\n";
  return give(text, out, room);
}

TEST size_t hostile_waits(char* out, size_t room) {
  Lock lock(world().mutex);
  return give(all_waits(), out, room);
}

// What a product has left behind on a device: streams, events, pinned memory, its context.
TEST size_t hostile_left(int ordinal, char* out, size_t room) {
  Lock lock(world().mutex);
  Device& device = *device_at(ordinal);
  size_t streams = 0, events = 0;
  for (auto& stream : device.streams) streams += stream.alive && !stream.of_test;
  for (auto& [_, event] : device.events) events += event->alive;
  std::string text;
  if (streams != 0) text += std::to_string(streams) + " streams; ";
  if (events != 0) text += std::to_string(events) + " events; ";
  const std::string pinned = pinned_left(ordinal);
  if (!pinned.empty()) text += pinned + "; ";
  if (device.retained != 0) text += "the context, " + std::to_string(device.retained) + " times; ";
  return give(text, out, room);
}

// Calls, as lines of thread, call and count.
TEST size_t hostile_calls(char* out, size_t room) {
  Lock lock(world().mutex);
  std::string text;
  for (auto& thread : world().threads) {
    for (auto& [call, count] : thread.calls) {
      text += thread.name + "\t" + call + "\t" + std::to_string(count) + "\n";
    }
  }
  return give(text, out, room);
}
