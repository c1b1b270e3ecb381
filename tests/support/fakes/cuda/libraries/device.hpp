// Streams, hardware queues and the thread that plays all devices of this process.
//
// A stream's ops run in order. Each stream has one of the device's hardware queues; a queue issues its ops in the
// order of their launches, whatever stream they are of: one that cannot start yet holds up all behind it.
// The time of an op is computed (start = the latest of what it waited for), not measured: a machine that is busy
// makes the fake late, but leaves its times right.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fake_cuda {

using Lock = std::unique_lock<std::mutex>;

struct Stream;
struct Capture;

// What an event stands for: the moment when a stream has passed it.
struct Passing {
  bool done = false;
  double time = 0;
  int stream = -1;
  uint64_t number = 0;
  Capture* capture = nullptr;  // recorded while a graph was being made: it never passes
  Stream* from = nullptr;
};

enum class Kind { kernel, copy, wait, record, host_function, network };

enum class Way { within, to_host, to_device };  // of a copy

struct After {
  Stream* stream;
  uint64_t number;
};

struct Op {
  Kind kind = Kind::kernel;
  const char* name = "kernel";     // for reports; never freed
  double seconds = 0;              // of a kernel or copy
  std::function<void()> effect = {};  // moves bytes at the op's end
  std::shared_ptr<Passing> passing = nullptr;  // of a wait or record
  std::function<void(Stream*, uint64_t)> begin = {};  // of what is on the network: starts that op of the stream
  std::function<std::string()> doing = {};  // of what is on the network, for reports: bytes and peers
  std::vector<After> after = {};   // legacy default stream: the other streams' ops before it
  Stream* stream = nullptr;
  uint64_t number = 0;
  double launched = 0;
  Way way = Way::within;
};

struct Queue {
  int ordinal;
  std::deque<Op> ops;
  Stream* holder = nullptr;  // whose running op keeps the queue
  double issued = 0;         // when the last op of this queue was
};

struct Stream {
  int ordinal, device, priority;
  bool blocking;             // waits for the legacy default stream, and it for this one
  Queue* queue;
  uint64_t launched = 0, completed = 0;
  double completed_at = 0;
  bool running = false, finishing = false;
  Capture* capture = nullptr;  // what is launched becomes a part of a graph
  bool unjoined = false;       // no other stream of the capture waits for its last op
  Op op = {};                // the one that runs
  double end = 0;
};

constexpr unsigned non_blocking = 1;  // the flag of stream creation

// All of these are thread-safe. A handle may be null (legacy default stream), 1 (the same) or 2 (per thread).
Stream* create_stream(int device, unsigned flags, int priority);
bool destroy_stream(Stream*);
Stream* stream_of(void* handle, int device);  // null for a handle that is no stream
bool known(void* handle);

bool launch(Stream*, Op);                     // blocks while the hardware queue is full. False: captured
void finish_network(Stream*, uint64_t number, double time);  // what an op of kind network ends with
bool passed(Stream*);                         // has nothing left to do

// The host waits; `why` names the call in the report of a stalled run.
void wait_stream(Stream*, const char* why);
void wait_device(int device, const char* why);
void wait_passing(const std::shared_ptr<Passing>&, const char* why);
bool passed(const std::shared_ptr<Passing>&);

// While one of these lives, its thread is reported as blocked.
class HostWait {
 public:
  HostWait(std::string call, std::string whom);
  ~HostWait();
  HostWait(const HostWait&) = delete;
  HostWait& operator=(const HostWait&) = delete;

 private:
  uint64_t key_;
};

void progress();                    // something has happened that a stalled run would not do
std::string what_waits();           // for each stream and blocked thread, what it waits for
uint64_t progress_count();
bool anything_waits();

}  // namespace fake_cuda
