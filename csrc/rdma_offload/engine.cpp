#include "engine.h"

#include <cstring>
#include <stdexcept>

#include "tcp_path.h"

namespace adaptra {

Engine::Engine(Limits limits) : limits_(limits), arena_(Arena::make(limits.arena)) {}

Engine::~Engine() { close("this side has closed the engine"); }

void Engine::add_peer(int rank, std::string name) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto peer = std::make_shared<Peer>(std::move(name), limits_.window);
  if (!peers_.try_emplace(rank, std::move(peer)).second) {
    throw std::invalid_argument("peer " + std::to_string(rank) + " is there already");
  }
}

void Engine::add_tcp(int rank, int fd) {
  auto to = peer(rank);
  auto path = std::make_shared<TcpPath>(fd, 2, limits_.piece, loop_, to);
  path->start();
  to->add(path);
}

void Engine::add_shm(int rank, ShmEnds ends, bool first) {
  auto to = peer(rank);
  auto path = std::make_shared<ShmPath>(ends, first, limits_.piece, arena_, loop_, to);
  path->start();
  to->add(path);
}

WorkRef Engine::send(int rank, uint32_t tag, const uint8_t* memory, uint64_t bytes) {
  auto to = peer(rank);
  Memory ours;
  if (arena_->holds(memory)) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto known = taken_.find(memory);
    if (known != taken_.end()) ours = known->second.lock();
  }
  if (!ours) {
    ours = arena_->take(bytes);
    if (!ours) throw std::runtime_error("no memory is left for a message");
    std::memcpy(ours.get(), memory, bytes);
  }
  return to->send(tag, std::move(ours), bytes);
}

WorkRef Engine::receive(int rank, uint32_t tag, uint8_t* memory, uint64_t bytes) {
  return peer(rank)->receive(tag, memory, bytes);
}

void Engine::abort(int rank, const WorkRef& work) { peer(rank)->abort(work); }

std::shared_ptr<uint8_t> Engine::take(uint64_t bytes) {
  auto memory = arena_->take(bytes);
  if (!memory) throw std::runtime_error("no memory is left for a message");
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto at = taken_.begin(); at != taken_.end();) {
    at = at->second.expired() ? taken_.erase(at) : std::next(at);
  }
  taken_[memory.get()] = memory;
  return memory;
}

Peer::Counts Engine::counts(int rank) { return peer(rank)->counts(); }

void Engine::close(const std::string& why) {
  std::unordered_map<int, std::shared_ptr<Peer>> peers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    peers = peers_;
  }
  for (auto& [rank, peer] : peers) peer->close(why);
  loop_.stop();
}

std::shared_ptr<Peer> Engine::peer(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto at = peers_.find(rank);
  if (at == peers_.end()) throw std::invalid_argument("there is no peer " + std::to_string(rank));
  return at->second;
}

}  // namespace adaptra
