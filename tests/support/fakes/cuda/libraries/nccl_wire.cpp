#include "nccl_wire.hpp"

#include <cerrno>
#include <cstring>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "device.hpp"
#include "options.hpp"

namespace fake_cuda {
namespace {

struct Hello {
  int32_t rank, control, device, plugin;
  uint64_t host;
};

socklen_t address(sockaddr_un* a, const std::string& id, int rank) {
  memset(a, 0, sizeof *a);
  a->sun_family = AF_UNIX;
  const std::string name = "fake-nccl-" + id + "-" + std::to_string(rank);
  memcpy(a->sun_path + 1, name.data(), std::min(name.size(), sizeof a->sun_path - 1));
  return (socklen_t)(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

bool all_of(int fd, void* data, size_t bytes, bool write, double until) {
  auto* at = (char*)data;
  while (bytes) {
    const ssize_t moved = write ? send(fd, at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(fd, at, bytes, MSG_DONTWAIT);
    if (moved > 0) {
      at += moved;
      bytes -= (size_t)moved;
    } else if (moved == 0 || (errno != EAGAIN && errno != EINTR) || now() > until) {
      return false;
    } else {
      pollfd ready{fd, (short)(write ? POLLOUT : POLLIN), 0};
      poll(&ready, 1, 100);
    }
  }
  return true;
}

int connect_to(const std::string& id, int rank, double until) {
  sockaddr_un a{};
  const socklen_t length = address(&a, id, rank);
  for (;;) {
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (sockaddr*)&a, length) == 0) return fd;
    close(fd);
    if (now() > until) return -1;
    usleep(2000);  // the other rank has no socket yet, and no way to say when it has
  }
}

}  // namespace

std::string Wire::open(const std::string& id, int own_rank, int ranks, int own_device, double seconds) {
  rank = own_rank;
  size = ranks;
  device = own_device;
  peers.resize((size_t)ranks);
  if (!network().fault.empty()) return network().fault;
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  const double until = now() + seconds;
  sockaddr_un a{};
  const socklen_t length = address(&a, id, rank);
  const int listening = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listening < 0 || bind(listening, (sockaddr*)&a, length) != 0 || listen(listening, 1024) != 0)
    return std::string("cannot listen: ") + strerror(errno);
  std::string fault;
  Hello mine{rank, 0, device, network().plugin != nullptr, network().host}, theirs{};
  auto known = [&](int fd) {
    Peer& peer = peers[(size_t)theirs.rank];
    (theirs.control ? peer.control : peer.data) = fd;
    peer.device = theirs.device;
    peer.host = theirs.host;
    if (theirs.plugin != mine.plugin) fault = "rank " + std::to_string(theirs.rank) + " has another network";
  };
  for (int p = 0; p < rank && fault.empty(); p++)
    for (mine.control = 0; mine.control < 2; mine.control++) {
      const int fd = connect_to(id, p, until);
      if (fd < 0 || !all_of(fd, &mine, sizeof mine, true, until) || !all_of(fd, &theirs, sizeof theirs, false, until)) {
        fault = "rank " + std::to_string(p) + " did not come";
        break;
      }
      theirs.control = mine.control;
      known(fd);
    }
  for (int left = 2 * (size - 1 - rank); left > 0 && fault.empty(); left--) {
    pollfd coming{listening, POLLIN, 0};
    while (poll(&coming, 1, 200) <= 0 && now() < until) continue;
    const int fd = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0 || !all_of(fd, &theirs, sizeof theirs, false, until) || !all_of(fd, &mine, sizeof mine, true, until)) {
      fault = "not all ranks came";
      break;
    }
    known(fd);
  }
  ::close(listening);
  if (fault.empty() && network().plugin) fault = connect_hosts(until);
  if (!fault.empty()) close();
  return fault;
}

std::string Wire::connect_hosts(double until) {
  std::vector<Peer*> others;
  for (int p = 0; p < size; p++) {
    Peer& peer = peers[(size_t)p];
    if (p == rank || peer.host == network().host) continue;
    peer.net = std::make_unique<NetLink>(rank, p);
    others.push_back(&peer);
  }
  NetName name{};
  for (Peer* peer : others)
    if (!peer->net->listen(&name) || !all_of(peer->control, &name, sizeof name, true, until)) return "cannot listen over the plugin";
  for (Peer* peer : others) {  // in the order of pairs that all ranks have
    bool done = all_of(peer->control, &name, sizeof name, false, until), ended = !done;
    for (done = false; !done && !ended; usleep(net_look)) {
      char byte = 0;
      ended = recv(peer->control, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0 || now() > until;
      if (!peer->net->connect(&name, &done)) ended = true;
    }
    if (!done) return "no connection over the plugin";
  }
  return "";
}

void Wire::abort() {
  aborted = true;
  const uint64_t one = 1;
  if (write(wake_, &one, sizeof one) < 0) return;
}

void Wire::close() {
  for (Peer& p : peers) {
    p.net.reset();
    for (int* fd : {&p.data, &p.control})
      if (*fd >= 0) {
        ::close(*fd);
        *fd = -1;
      }
  }
  if (wake_ >= 0) ::close(wake_);
  wake_ = -1;
}

bool Wire::send_note(int peer, Note note) {
  return all_of(peers[(size_t)peer].control, &note, sizeof note, true, now() + nccl_seconds);
}

bool Wire::receive_note(int peer, int kind, Note* found) {
  Peer& p = peers[(size_t)peer];
  for (;;) {
    {
      std::lock_guard<std::mutex> lock(notes_mutex_);
      for (auto note = p.notes.begin(); note != p.notes.end(); ++note)
        if (note->kind == kind) {
          *found = *note;
          p.notes.erase(note);
          return true;
        }
      Note note{};
      const ssize_t size = recv(p.control, &note, sizeof note, MSG_DONTWAIT | MSG_PEEK);
      if (size == 0) {
        lost = true;
        return false;
      }
      if (size == (ssize_t)sizeof note) {
        if (recv(p.control, &note, sizeof note, MSG_DONTWAIT) != size) return false;
        p.notes.push_back(note);
        continue;
      }
    }
    if (aborted) return false;
    pollfd ready[2] = {{p.control, POLLIN, 0}, {wake_, POLLIN, 0}};
    poll(ready, 2, 100);  // another thread may have taken the note meanwhile
  }
}

std::string Wire::doing() {
  std::lock_guard<std::mutex> lock(doing_mutex_);
  return doing_;
}

}  // namespace fake_cuda
