#include "engine.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "tcp/tcp_path.h"

namespace adaptra {

namespace {

constexpr size_t kEvents = 10000;  // that are kept until `events` is called
constexpr double kTicks = 4;       // per beat

Nanoseconds nano(double seconds) { return static_cast<Nanoseconds>(seconds * 1e9); }

}  // namespace

Engine::Engine(Limits limits)
    : limits_(limits), arena_(Arena::make(limits.arena)), blank_(arena_->take(kProbe)) {
  const auto period = std::chrono::milliseconds(static_cast<int>(1e3 * limits.beat / kTicks) + 1);
  loop_.every(period, [this] { tick(); });
}

Engine::~Engine() { close("this side has closed the engine"); }

void Engine::add_peer(int rank, std::string name) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto peer = std::make_shared<Peer>(
      std::move(name), limits_.window,
      [this, rank](const Path* path, const std::string& what) { note({rank, path->id, what}); },
      blank_);
  if (!peers_.try_emplace(rank, std::move(peer)).second) {
    throw std::invalid_argument("peer " + std::to_string(rank) + " is there already");
  }
}

// One that cannot be watched ends as any other does.
template <typename P, typename... Args>
int Engine::launch(int rank, const std::shared_ptr<P>& path, Args&&... args) {
  const int id = add(rank, path);
  try {
    path->start(std::forward<Args>(args)...);
  } catch (const std::system_error& error) {
    loop_.soon([path, why = std::string(error.what())] { path->fail(why); });
  }
  return id;
}

int Engine::add_tcp(int rank, Owned fd, int order, std::unique_ptr<Tls> tls) {
  auto to = peer(rank);
  return launch(rank, std::make_shared<TcpPath>(std::move(fd), order, limits_.piece, loop_, to,
                                                std::move(tls)));
}

int Engine::add_shm(int rank, ShmEnds ends, bool first) {
  auto to = peer(rank);
  return launch(rank, std::make_shared<ShmPath>(std::move(ends), first, limits_.piece, arena_, loop_, to));
}

std::shared_ptr<VerbsPath> Engine::open_verbs(int rank, const std::string& device, int port,
                                              int gid, const VerbsChoice& which, VerbsService service) {
  std::shared_ptr<VerbsDevice> opened;
  {
    std::lock_guard<std::mutex> lock(opening_);
    auto& known = devices_[device];
    if (!known || known->dead()) known = VerbsDevice::open(device, arena_, loop_);
    opened = known;
  }
  return std::make_shared<VerbsPath>(opened, port, gid, which, service, limits_.piece, loop_,
                                     peer(rank));
}

int Engine::add_verbs(int rank, const std::shared_ptr<VerbsPath>& path, Owned socket,
                      int order) {
  path->order = order;
  return launch(rank, path, std::move(socket));
}

int Engine::add(int rank, const std::shared_ptr<Path>& path) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    path->id = ++paths_;
  }
  peer(rank)->add(path);
  return path->id;
}

void Engine::fail_peer(int rank, const std::string& why) { peer(rank)->close(why); }

void Engine::tick() {
  for (auto& [rank, peer] : peers()) peer->tick(nano(limits_.beat), nano(limits_.silence));
}

void Engine::note(Event event) {
  std::lock_guard<std::mutex> lock(noting_);
  events_.push_back(std::move(event));
  if (events_.size() > kEvents) events_.pop_front();
  noted_.notify_all();
}

void Engine::wake() {
  std::lock_guard<std::mutex> lock(noting_);
  woken_ = true;
  noted_.notify_all();
}

std::vector<Engine::Event> Engine::events(double seconds) {
  std::unique_lock<std::mutex> lock(noting_);
  noted_.wait_for(lock, patience(seconds), [this] { return woken_ || !events_.empty(); });
  woken_ = false;
  std::vector<Event> found(events_.begin(), events_.end());
  events_.clear();
  return found;
}

WorkRef Engine::send(int rank, Tag tag, const uint8_t* memory, uint64_t bytes,
                     Nanoseconds sent) {
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
    // The first pieces are on their way while the last ones are copied.
    uint64_t number = 0;
    auto work = to->begin(tag, ours, bytes, sent, &number);
    for (uint64_t at = 0; at < bytes;) {
      const uint64_t part = std::min(bytes - at, limits_.piece);
      std::memcpy(ours.get() + at, memory + at, part);
      to->filled(number, at += part);
    }
    if (bytes == 0) to->filled(number, 0);
    return work;
  }
  return to->send(tag, std::move(ours), bytes, sent);
}

WorkRef Engine::send(int rank, Tag tag, Memory memory, uint64_t bytes, Nanoseconds sent) {
  if (!arena_->holds(memory.get())) return send(rank, tag, memory.get(), bytes, sent);
  return peer(rank)->send(tag, std::move(memory), bytes, sent);
}

WorkRef Engine::begin(int rank, Tag tag, Memory memory, uint64_t bytes, Nanoseconds sent,
                      std::shared_ptr<Filling>* filling) {
  auto made = std::make_shared<Filling>();
  made->peer = peer(rank);
  made->bytes = bytes;
  made->from = made->memory = std::move(memory);
  if (!arena_->holds(made->from.get())) {
    made->memory = arena_->take(bytes);
    if (!made->memory) throw std::runtime_error("no memory is left for a message");
  }
  auto work = made->peer->begin(tag, made->memory, bytes, sent, &made->number);
  *filling = std::move(made);
  return work;
}

void Engine::filled(const std::shared_ptr<Filling>& filling, uint64_t bytes) {
  loop_.soon([filling, bytes] {
    Filling& one = *filling;
    if (one.memory && one.memory != one.from) {
      std::memcpy(one.memory.get() + one.copied, one.from.get() + one.copied, bytes - one.copied);
    }
    one.copied = bytes;
    if (bytes == one.bytes) {  // from here on it belongs to what sends it
      one.from.reset();
      one.memory.reset();
    }
    one.peer->filled(one.number, bytes);
  });
}

WorkRef Engine::receive(int rank, Tag tag, uint8_t* memory, uint64_t bytes, bool exact,
                        Progress progress) {
  return peer(rank)->receive(tag, memory, bytes, exact, std::move(progress));
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
  for (auto& [rank, peer] : peers()) peer->close(why);
  loop_.stop();
  wake();
}

std::unordered_map<int, std::shared_ptr<Peer>> Engine::peers() {
  std::lock_guard<std::mutex> lock(mutex_);
  return peers_;
}

std::shared_ptr<Peer> Engine::peer(int rank) {
  if (getpid() != process_) {  // whose locks may be held by threads that are not here
    throw std::runtime_error("this engine is of process " + std::to_string(process_) +
                             ", and " + std::to_string(getpid()) + " is a child of it");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  auto at = peers_.find(rank);
  if (at == peers_.end()) throw std::invalid_argument("there is no peer " + std::to_string(rank));
  return at->second;
}

}  // namespace adaptra
