// What the hostile device consists of: operations, streams, events, threads of the host, findings.
//
// One lock for everything: this is about orders, not about speed. What orders two operations is
// known when they are issued (a stream's order, events waited for, what the host has seen to be
// over), so clocks are taken then, whatever the device does later.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace hostile {

using Nanoseconds = uint64_t;        // of CLOCK_MONOTONIC
using Clock = std::vector<uint64_t>;  // by stream of a device: so many of its operations are before

struct Device;
struct Stream;

struct Op {
  // `collective`: as NCCL's of a training, it is over when all its members' have begun.
  enum class Kind { kernel, copy, record, wait, collective };
  enum class State { queued, running, over };

  Kind kind;
  std::string what;  // for findings
  Stream* stream = nullptr;
  uint64_t number = 0;  // in its stream, from 1
  Clock clock;
  std::vector<std::shared_ptr<Op>> after;  // beside what is before it in its stream
  std::function<void()> begins, ends;
  std::string key;  // of `collective`: which one it is
  State state = State::queued;
  Nanoseconds begun = 0, passed = 0;

  bool over() const { return state == State::over; }
};
using OpRef = std::shared_ptr<Op>;

struct Stream {
  Device* device;
  size_t number;
  std::string name;
  bool blocking;  // it and the legacy default stream wait for each other
  size_t queue;
  double weight;  // how likely it moves
  bool alive = true, of_test = false;
  uint64_t count = 0;
  Clock clock;
  OpRef last, running;
};

struct Queue {
  std::deque<OpRef> waiting;
};

struct Touch {
  const void* at;
  size_t bytes;
  bool writes;
};

struct Event {
  Device* device;
  unsigned flags;
  bool alive = true;
  OpRef record;  // the last one
};

// A thread of the host that has called the driver.
struct Thread {
  std::string name;
  Device* device = nullptr;  // whose context is current
  bool trains = false;       // a test's: the product's own threads have others' work before them
  const char* call = "";     // in which it is blocked
  OpRef blocked;
  std::string awaits;                   // a key
  std::map<std::string, uint64_t> calls;
};

struct Device {
  int ordinal;
  std::mt19937_64 random;
  std::deque<Stream> streams;  // the first is the legacy default one
  std::vector<Queue> queues;
  uint64_t calls = 0;
  Clock host;  // what the host has seen to be over
  size_t collectives = 0;  // that are not over
  unsigned retained = 0;
  // The seed's mood.
  double moves = 1, synchronises = 0;  // how likely a call moves the device, or waits for all of it
  bool pins_wait = false;  // to pin memory, and to give it back, waits for all of it
  int steps = 1;                       // that a call, or a quiet moment, moves it by at most
  double drift = 0;                    // of its clock
  std::map<Event*, std::unique_ptr<Event>> events;

  double chance() { return std::uniform_real_distribution<double>()(random); }
};

struct Collective {
  std::vector<std::string> members;     // threads
  std::map<std::string, OpRef> launched;  // by member
  size_t begun = 0;
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;  // for threads of the host that wait
  std::condition_variable work;     // for the driver's own thread
  bool resting = false;             // it has nothing to do
  std::deque<Device> devices;
  std::deque<Thread> threads;
  std::map<std::string, std::string> promised;  // message: the thread that will send it
  std::map<std::string, Collective> collectives;
  std::map<const void*, std::string> sending;  // messages, by the memory that will be copied
  std::map<std::string, OpRef> sent;           // and by which copy they were; none: still to come
  std::vector<std::string> findings;
  bool failed = false;  // a deadlock was found, or a rank gave up: those that wait are let go
  std::string lost;     // planted: the call that waits, or asks whether something is over, and does not
  std::map<std::string, std::pair<int, int>> failing;  // call: after so many of it, with this code
  // When kernels really ran, by device and name.
  std::map<std::pair<int, std::string>, std::pair<Nanoseconds, Nanoseconds>> spans;
};

World& world();
using Lock = std::unique_lock<std::mutex>;

Thread& this_thread();
Nanoseconds now();
void finding(const std::string& text);  // once for each text
void join(Clock& into, const Clock& other);
inline bool before(size_t stream, uint64_t number, const Clock& clock) {
  return stream < clock.size() && clock[stream] >= number;
}
std::string in_words(const Op& op);

// issue.cpp: what is ordered before what; races are found here.
OpRef issue(Stream& stream, Op op, const std::vector<Touch>& touches = {});
void seen_over(Device& device, const Op& op);  // by the host
void seen_idle(Device& device);
Stream& add_stream(Device& device, bool blocking, const std::string& name);

// step.cpp
bool step(Device& device);  // one move of anything; false: nothing can move now
void called(Lock& lock, Device& device, const char* call);  // what a call does to the device
void start_driver_thread();
void stop_driver_thread();

// Blocks until everything of the device is over: 0, or a CUDA error.
int wait_for(Lock& lock, Device& device, const char* call);

// waits.cpp: who waits for whom, from `thread` back to it; empty without a circle.
std::string circle(const Thread& thread, bool long_since = false);
// At threads that wait elsewhere: whether there was a circle, which is dissolved. `long_since`:
// nothing has moved for a while, so that what has not been sent on is held up by its sender.
bool look(bool long_since);
std::string all_waits();

}  // namespace hostile
