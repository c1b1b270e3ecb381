// All messages of one process: its memory, its thread, its peers. A forked child cannot use it:
// whatever it asks for a rank throws std::runtime_error.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/arena.h"
#include "core/loop.h"
#include "core/peer.h"
#include "shm/shm_path.h"
#include "tcp/tls.h"
#include "verbs/verbs_path.h"

namespace adaptra {

struct Limits {
  uint64_t window = 64 << 20;  // bytes per peer that may come before their receive is posted
  uint64_t piece = 1 << 20;    // of a message: what goes over one path at a time
  uint64_t arena = 64ull << 30;
  double beat = 1.0;           // seconds without a frame after which one is sent
  double silence = 5.0;        // seconds without a frame after which a path is given up
};

class Engine {
 public:
  explicit Engine(Limits limits);
  ~Engine();

  // A forked child has an engine without its thread, and must not end it.
  struct End {
    void operator()(Engine* engine) const {
      if (engine->process_ == getpid()) delete engine;
    }
  };

  // Throws std::invalid_argument for a peer that is known already.
  void add_peer(int rank, std::string name);

  // A path, which takes over what it is given, also where this throws; its number, for events.
  // `order`: see Path; from kTrial on it is on trial.
  int add_tcp(int rank, Owned fd, int order, std::unique_ptr<Tls> tls = nullptr);
  int add_shm(int rank, ShmEnds ends, bool first);

  // A path over RDMA, in two steps: one that is not connected, and, once it is, its start.
  std::shared_ptr<VerbsPath> open_verbs(int rank, const std::string& device, int port, int gid,
                                        const VerbsChoice& which, VerbsService service);
  int add_verbs(int rank, const std::shared_ptr<VerbsPath>& path, Owned socket, int order);

  // All that is under way with a peer fails, because of `why`.
  void fail_peer(int rank, const std::string& why);

  struct Event {
    int rank, path;
    std::string what;  // why it has failed; empty: it came back, and has carried a probe
  };
  // What has happened since the last call, after `seconds` at most; empty as well when woken.
  std::vector<Event> events(double seconds);
  void wake();

  // Send a copy of `bytes` at `memory`; nothing is copied where that is of this engine's `take`.
  WorkRef send(int rank, Tag tag, const uint8_t* memory, uint64_t bytes, Nanoseconds sent = 0);
  // The same of what stays as it is while `memory` is referenced: nothing of the arena is copied.
  WorkRef send(int rank, Tag tag, Memory memory, uint64_t bytes, Nanoseconds sent = 0);

  // A message whose bytes are not there yet, and what says how many are.
  struct Filling {
    std::shared_ptr<Peer> peer;
    uint64_t number = 0, bytes = 0;
    Memory from, memory;   // where the bytes will be; where it is sent from, which may be another place
    uint64_t copied = 0;   // of the loop's thread: bytes, where it is another one
  };
  WorkRef begin(int rank, Tag tag, Memory memory, uint64_t bytes, Nanoseconds sent,
                std::shared_ptr<Filling>* filling);
  // `bytes` are there, from the first on, which the loop's thread sends: the caller does not copy
  // them to any socket.
  void filled(const std::shared_ptr<Filling>& filling, uint64_t bytes);

  WorkRef receive(int rank, Tag tag, uint8_t* memory, uint64_t bytes, bool exact = true,
                  Progress progress = {});
  void abort(int rank, const WorkRef& work);

  std::shared_ptr<uint8_t> take(uint64_t bytes);
  std::string prefer_node(int node) { return arena_->prefer_node(node); }  // see Arena
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  int arena_fd() const { return arena_->fd(); }
  Peer::Counts counts(int rank);

  void close(const std::string& why);

 private:
  // On any thread, without a lock; each takes the one it needs.
  std::shared_ptr<Peer> peer(int rank);  // throws for an unknown one, and in a forked child
  std::unordered_map<int, std::shared_ptr<Peer>> peers();
  int add(int rank, const std::shared_ptr<Path>& path);  // number it and give it to its peer
  template <typename P, typename... Args>
  int launch(int rank, const std::shared_ptr<P>& path, Args&&... args);  // add and start it
  void tick();              // on the loop's thread: alive frames, and silent paths
  void note(Event event);   // for `events`

  const pid_t process_ = getpid();
  const Limits limits_;
  const std::shared_ptr<Arena> arena_;
  const Memory blank_;  // that probes carry
  std::mutex mutex_;
  std::unordered_map<int, std::shared_ptr<Peer>> peers_;
  std::unordered_map<const uint8_t*, std::weak_ptr<uint8_t>> taken_;
  int paths_ = 0;
  std::mutex opening_;
  std::unordered_map<std::string, std::shared_ptr<VerbsDevice>> devices_;
  std::mutex noting_;
  std::condition_variable noted_;
  std::deque<Event> events_;  // the newest
  bool woken_ = false;
  Loop loop_;  // last: its thread ends before what it works on
};

}  // namespace adaptra
