// All messages of one process: its memory, its thread, its peers.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "arena.h"
#include "loop.h"
#include "peer.h"
#include "shm_path.h"

namespace adaptra {

struct Limits {
  uint64_t window = 64 << 20;  // bytes per peer that may come before their receive is posted
  uint64_t piece = 1 << 20;    // of a message: what goes over one path at a time
  uint64_t arena = 64ull << 30;
};

class Engine {
 public:
  explicit Engine(Limits limits);
  ~Engine();

  // Throws std::invalid_argument for a peer that is known already.
  void add_peer(int rank, std::string name);
  void add_tcp(int rank, int fd);
  void add_shm(int rank, ShmEnds ends, bool first);

  // Send a copy of `bytes` at `memory`; nothing is copied where that is of this engine's `take`.
  WorkRef send(int rank, uint32_t tag, const uint8_t* memory, uint64_t bytes);
  WorkRef receive(int rank, uint32_t tag, uint8_t* memory, uint64_t bytes);
  void abort(int rank, const WorkRef& work);

  std::shared_ptr<uint8_t> take(uint64_t bytes);
  int arena_fd() const { return arena_->fd(); }
  Peer::Counts counts(int rank);

  void close(const std::string& why);

 private:
  std::shared_ptr<Peer> peer(int rank);

  const Limits limits_;
  const std::shared_ptr<Arena> arena_;
  std::mutex mutex_;
  std::unordered_map<int, std::shared_ptr<Peer>> peers_;
  std::unordered_map<const uint8_t*, std::weak_ptr<uint8_t>> taken_;
  Loop loop_;  // last: its thread ends before what it works on
};

}  // namespace adaptra
