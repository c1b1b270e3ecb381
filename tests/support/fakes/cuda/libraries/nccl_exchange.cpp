// Messages over a communicator's sockets: frames of a head and, for data, its bytes. To a rank of another host the
// bytes go over NCCL's network plugin, if there is one: then that is how late they are.
//
// A receiver gives a credit for each receive that it has posted; data is sent for a credit. So a send waits for its
// receive, as NCCL allows itself to.
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "device.hpp"
#include "nccl_links.hpp"
#include "nccl_wire.hpp"
#include "options.hpp"

namespace fake_cuda {
namespace {

constexpr uint32_t credit = 0x43524544;  // a frame's kind; others are those of messages

constexpr double never = std::numeric_limits<double>::infinity();

struct Head {
  uint32_t magic, kind;
  uint64_t bytes;
  double sent;
};
constexpr uint32_t magic = 0xFA5EC0DE;

struct Outgoing {
  Head head;
  const char* data;
  size_t moved = 0;
};

struct Incoming {
  Message message;
  double due = never; // once it is all there
  size_t moved = 0;
};

struct Side {
  std::deque<Outgoing> out;       // on its way into the socket
  std::deque<Message> sends;      // waiting for credits
  std::deque<Incoming> receives;
  size_t arriving = 0;            // of the receives, those that are all there
  size_t arrived = 0;             // receives that are over
};

enum class Step { moved, blocked, broken };

Step put(int fd, Outgoing& o) {
  const bool head = o.moved < sizeof(Head);
  const char* at = head ? (const char*)&o.head + o.moved : o.data + (o.moved - sizeof(Head));
  const size_t left = head ? sizeof(Head) - o.moved : o.head.bytes - (o.moved - sizeof(Head));
  const ssize_t size = send(fd, at, left, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (size <= 0) return errno == EAGAIN || errno == EINTR ? Step::blocked : Step::broken;
  o.moved += (size_t)size;
  return Step::moved;
}

size_t frame(const Outgoing& o) { return sizeof(Head) + (o.data ? o.head.bytes : 0); }

}  // namespace

bool Wire::exchange(std::vector<Message> sends, std::vector<Message> receives, const Arrived& arrived) {
  std::vector<Side> sides((size_t)size);
  for (Message& m : receives)
    if (m.peer != rank) {
      sides[(size_t)m.peer].receives.push_back({m});
      sides[(size_t)m.peer].out.push_back({{magic, credit, m.bytes, now()}, nullptr});
      if (NetLink* net = peers[(size_t)m.peer].net.get()) net->receiving.post(m.at, m.bytes);
    }
  for (Message& m : sends) {
    if (m.peer != rank) {
      sides[(size_t)m.peer].sends.push_back(m);
      continue;
    }
    auto own = std::find_if(receives.begin(), receives.end(), [&](Message& r) { return r.peer == rank && r.at; });
    if (own == receives.end()) {
      say("NCCL: rank %d sends to itself and has not posted the receive", rank);
      misused = true;
      continue;
    }
    memmove(own->at, m.at, std::min(m.bytes, own->bytes));
    own->at = nullptr;
  }
  Head head{};
  size_t head_moved = 0;
  std::vector<Head> heads((size_t)size, head);
  std::vector<size_t> heads_moved((size_t)size, head_moved);
  auto fits = [&](int p, uint32_t kind, size_t bytes) {
    const Side& side = sides[(size_t)p];
    if (side.arriving == side.receives.size()) {
      say("NCCL: rank %d has posted no receive for what rank %d sends", rank, p);
      misused = true;
      return false;
    }
    const Message& m = side.receives[side.arriving].message;
    if (kind == m.kind && bytes == m.bytes) return true;
    say("NCCL: rank %d has posted a receive of kind %u with %zu bytes from rank %d, which sends kind %u with %zu bytes",
        rank, m.kind, m.bytes, p, kind, bytes);
    misused = true;
    return false;
  };
  auto complete = [&](int p, double sent) {
    Side& side = sides[(size_t)p];
    Incoming& in = side.receives[side.arriving++];
    if (!peers[(size_t)p].net) in.due = arrival(peers[(size_t)p].device, device, sent);
  };

  // Reads frames of one peer. False when there is nothing more for now.
  auto read_some = [&](int p) {
    Peer& peer = peers[(size_t)p];
    Side& side = sides[(size_t)p];
    Head& h = heads[(size_t)p];
    size_t& got = heads_moved[(size_t)p];
    auto take = [&](void* at, size_t bytes) -> ssize_t {
      const ssize_t found = recv(peer.data, at, bytes, MSG_DONTWAIT);
      if (found == 0 || (found < 0 && errno != EAGAIN && errno != EINTR)) lost = true;
      if (found > 0) progress();
      return found;
    };
    if (got < sizeof(Head)) {
      const ssize_t found = take((char*)&h + got, sizeof(Head) - got);
      if (found <= 0) return false;
      got += (size_t)found;
      if (got < sizeof(Head)) return true;
      if (h.kind == credit) {
        peer.credits++;
        got = 0;
        return true;
      }
      if (h.magic != magic) {
        say("NCCL: rank %d has got from rank %d what is no head of a frame", rank, p);
        misused = true;
        return false;
      }
      if (!fits(p, h.kind, h.bytes)) return false;
    }
    Incoming& in = side.receives[side.arriving];
    if (!peer.net && in.moved < in.message.bytes) {
      const ssize_t found = take(in.message.at + in.moved, in.message.bytes - in.moved);
      if (found <= 0) return false;
      in.moved += (size_t)found;
    }
    if (peer.net || in.moved == in.message.bytes) {
      complete(p, h.sent);
      got = 0;
    }
    return true;
  };

  // Moves what goes over the plugin to and from one peer. A receive is asked after once its head has come. False when
  // nothing is over.
  auto move_net = [&](int p) {
    NetLink& net = *peers[(size_t)p].net;
    size_t came = 0, gone = 0;
    if (!net.sending.move(true, &gone) || !net.receiving.move(sides[(size_t)p].arriving > 0, &came)) lost = true;
    if (came + gone == 0) return false;
    progress();
    for (Incoming& in : sides[(size_t)p].receives)
      if (in.due == never && came && came--) in.due = now();
    return true;
  };

  for (;;) {
    if (aborted) return false;
    bool all_done = true, again = false;
    double nearest = now() + 0.1;
    std::vector<pollfd> polled = {{wake_, POLLIN, 0}};
    std::string waits;
    for (int p = 0; p < size; p++) {
      if (p == rank) continue;
      Side& side = sides[(size_t)p];
      Peer& peer = peers[(size_t)p];
      // A frame that has begun is read to its end, so that the next exchange starts with a head.
      auto reads = [&] { return side.arriving < side.receives.size() || (!side.sends.empty() && peer.credits <= 0) || heads_moved[(size_t)p]; };
      while (!lost && !misused && reads() && read_some(p)) again = true;
      while (!side.sends.empty() && peer.credits > 0) {
        const Message m = side.sends.front();
        side.sends.pop_front();
        peer.credits--;
        side.out.push_back({{magic, m.kind, m.bytes, now()}, peer.net ? nullptr : m.at});
        if (peer.net) peer.net->sending.post(m.at, m.bytes);
      }
      while (!side.out.empty()) {
        const Step step = put(peer.data, side.out.front());
        if (step == Step::broken) lost = true;
        if (step != Step::moved) break;
        progress();
        if (side.out.front().moved == frame(side.out.front())) side.out.pop_front();
      }
      if (peer.net && !lost && !misused && move_net(p)) again = true;
      while (!side.receives.empty() && side.arriving && side.receives.front().due <= now()) {
        side.receives.pop_front();
        side.arriving--;
        if (arrived)
          for (Message& m : arrived(side.arrived++)) sides[(size_t)m.peer].sends.push_back(m);
        again = true;
      }
      const bool net_sends = peer.net && !peer.net->sending.empty();
      if (net_sends || (peer.net && (side.arriving || peer.net->receiving.starting()))) {
        nearest = std::min(nearest, now() + 1e-6 * net_look);
      } else if (!side.receives.empty() && side.arriving) {
        nearest = std::min(nearest, side.receives.front().due);
        progress();  // late, as was asked for
      }
      const bool sending = net_sends || !side.sends.empty() || !side.out.empty(), receiving = !side.receives.empty();
      if (!sending && !receiving && !heads_moved[(size_t)p]) continue;
      all_done = false;
      waits += std::string(waits.empty() ? "" : "; ") + (receiving ? "receives from" : "") + (sending && receiving ? " and " : "") +
               (sending ? "sends to" : "") + " rank " + std::to_string(p) + " (device " + std::to_string(peer.device) + ")";
      const auto events = (short)((reads() ? POLLIN : 0) | (side.out.empty() ? 0 : POLLOUT));
      polled.push_back({events ? peer.data : -1, events, 0});
    }
    if (all_done && !again) return true;
    if (again && !lost && !misused) continue;
    {
      std::lock_guard<std::mutex> lock(doing_mutex_);
      doing_ = waits;
    }
    if (lost || misused) polled.resize(1);  // as a kernel whose peer is gone: until it is aborted
    const double left = std::max(0.0, nearest - now());
    timespec span{(time_t)left, (long)(1e9 * (left - std::floor(left)))};
    ppoll(polled.data(), polled.size(), &span, nullptr);
  }
}

}  // namespace fake_cuda
