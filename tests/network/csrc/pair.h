// Two engines of one process, and real connections between them that can be cut.
#pragma once

#include <arpa/inet.h>
#include <dirent.h>
#include <sys/socket.h>
#include <unistd.h>

#include <mutex>
#include <thread>
#include <vector>

#include "check.h"
#include "engine.h"
#include "tcp/tls.h"

inline size_t open_descriptors() {
  size_t count = 0;
  DIR* all = opendir("/proc/self/fd");
  while (readdir(all) != nullptr) ++count;
  closedir(all);
  return count;
}

// Both ends of a connection over loopback.
inline void connect_tcp(int ends[2]) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof at;
  auto* address = reinterpret_cast<sockaddr*>(&at);
  CHECK(bind(listener, address, size) == 0 && listen(listener, 1) == 0);
  CHECK(getsockname(listener, address, &size) == 0);
  ends[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(connect(ends[0], address, size) == 0);
  ends[1] = accept(listener, nullptr, nullptr);
  CHECK(ends[1] >= 0);
  close(listener);
}

// What each side of a path through memory is given; `first` has the first half.
inline void connect_shm(int arena_of_first, int arena_of_second, adaptra::ShmEnds ends[2]) {
  int sockets[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
  const int ring = adaptra::ShmPath::new_ring();
  ends[0] = {sockets[0], ring, dup(arena_of_second)};
  ends[1] = {sockets[1], dup(ring), dup(arena_of_first)};
}

class Pair {
 public:
  static constexpr int kTcp = 2;  // order of paths

  explicit Pair(adaptra::Limits limits) : engines{adaptra::Engine(limits), adaptra::Engine(limits)} {
    for (int side = 0; side < 2; ++side) {
      engines[side].add_peer(1 - side, "rank " + std::to_string(1 - side));
    }
  }
  ~Pair() {
    while (cut(0)) continue;
  }

  // The numbers of the path at each side.
  std::pair<int, int> tcp(int order = kTcp) {
    int ends[2];
    connect_tcp(ends);
    remember(ends[0]);
    return {engines[0].add_tcp(1, ends[0], order), engines[1].add_tcp(0, ends[1], order)};
  }
  std::pair<int, int> encrypted() {
    int ends[2];
    connect_tcp(ends);
    std::unique_ptr<adaptra::Tls> tls[2];
    const std::string key(32, 'k');
    const auto shake = [&](int side) {
      tls[side] = std::make_unique<adaptra::Tls>(ends[side], key, side == 0, kPatience);
    };
    std::thread other(shake, 1);
    shake(0);
    other.join();
    remember(ends[0]);
    return {engines[0].add_tcp(1, ends[0], kTcp, std::move(tls[0])),
            engines[1].add_tcp(0, ends[1], kTcp, std::move(tls[1]))};
  }
  std::pair<int, int> shm() {
    adaptra::ShmEnds ends[2];
    connect_shm(engines[0].arena_fd(), engines[1].arena_fd(), ends);
    remember(ends[0].socket);
    return {engines[0].add_shm(1, std::move(ends[0]), true),
            engines[1].add_shm(0, std::move(ends[1]), false)};
  }

  // Cut one of the paths that were not cut; whether there was one.
  bool cut(size_t which) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (whole_.empty()) return false;
    const auto at = whole_.begin() + which % whole_.size();
    shutdown(*at, SHUT_RDWR);
    close(*at);
    whole_.erase(at);
    return true;
  }
  size_t whole() {
    std::lock_guard<std::mutex> lock(mutex_);
    return whole_.size();
  }

  adaptra::Engine engines[2];

 private:
  void remember(int socket) {
    std::lock_guard<std::mutex> lock(mutex_);
    whole_.push_back(dup(socket));
  }

  std::mutex mutex_;
  std::vector<int> whole_;  // a socket of each path that was not cut
};
