#include "tcp/tcp_path.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>

namespace adaptra {

namespace {
constexpr uint64_t kQueue = 4 << 20;        // bytes that may wait here: the rest stays with the peer
constexpr size_t kAtOnce = 32;              // frames for one call of the kernel
constexpr uint64_t kTurn = 4 << 20;         // bytes read before others have their turn
constexpr int kInside = 1 << 20;            // bytes that a connection inside a machine holds
constexpr int kFar = 4 << 20;               // and what one over a long link may have under way
constexpr int kUnsent = 512 << 10;          // beside what it may not send yet

// Whether both ends have one address: then the kernel passes on what is sent, at once.
bool inside(int fd) {
  sockaddr_storage here{}, there{};
  socklen_t ours = sizeof here, theirs = sizeof there;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&here), &ours) != 0 ||
      getpeername(fd, reinterpret_cast<sockaddr*>(&there), &theirs) != 0) {
    return false;
  }
  const auto& a = reinterpret_cast<sockaddr_in&>(here);
  const auto& b = reinterpret_cast<sockaddr_in&>(there);
  return a.sin_family == AF_INET && b.sin_family == AF_INET &&
         a.sin_addr.s_addr == b.sin_addr.s_addr;
}

void set(int fd, int level, int option, int value) {
  setsockopt(fd, level, option, &value, sizeof value);
}

// Nothing to pace, and what waits should stay in the cache.
void prepare_inside(int fd) {
  setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
  set(fd, SOL_SOCKET, SO_SNDBUF, kInside);
}

// What a long link holds is sent in one go, and spread over all connections: none takes more than
// it can send while others could.
void prepare_far(int fd) {
  int most = 0;
  std::ifstream("/proc/sys/net/core/wmem_max") >> most;
  if (most >= kFar) set(fd, SOL_SOCKET, SO_SNDBUF, kFar);  // else the kernel's own choice is larger
  set(fd, SOL_SOCKET, SO_RCVLOWAT, 2 * kFar);  // makes room for so much, which then stays
  set(fd, SOL_SOCKET, SO_RCVLOWAT, 1);
  set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, kUnsent);
}

}  // namespace

TcpPath::TcpPath(Owned fd, int order, uint64_t piece, Loop& loop, std::weak_ptr<Sink> sink,
                 std::unique_ptr<Tls> tls)
    : Path(order, piece),
      fd_(std::move(fd)),
      tls_(std::move(tls)),
      loop_(loop),
      sink_(std::move(sink)),
      decoder_(piece) {
  set(fd_, IPPROTO_TCP, TCP_NODELAY, 1);
  inside(fd_) ? prepare_inside(fd_) : prepare_far(fd_);
}

void TcpPath::start() {
  auto self = weak_from_this();
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return;  // what it was given first has broken it
  // It may have been given more than the socket takes before this.
  const uint32_t room = watches_room_ ? uint32_t{EPOLLOUT} : 0u;
  loop_.watch(fd_, EPOLLIN | EPOLLRDHUP | room, [self](uint32_t events) {
    if (auto path = self.lock()) path->ready(events);
  });
}

bool TcpPath::takes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !closed_ && waiting_ < kQueue;
}

uint64_t TcpPath::waiting() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return waiting_;
}

// From what the kernel knows: a window of bytes for each round trip, which doubles with each of them
// until the connection has found what the link carries.
Nanoseconds TcpPath::guess(uint64_t bytes) const {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return UINT64_MAX;
  const double window = std::max(1.0, 1.0 * info.tcpi_snd_cwnd * info.tcpi_snd_mss);
  const double trips =
      (static_cast<double>(waiting() + bytes) + 1.0 * info.tcpi_unacked * info.tcpi_snd_mss) / window;
  const bool grows = info.tcpi_snd_cwnd < info.tcpi_snd_ssthresh;
  const double rounds = grows ? std::log2(1 + trips) : trips;
  return static_cast<Nanoseconds>((0.5 + rounds) * info.tcpi_rtt * 1000);
}

void TcpPath::send(const Header& header, const uint8_t* payload, std::shared_ptr<void> keep) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return;  // its end is on the way to the peer
  frames_.push_back({header, payload, std::move(keep)});
  waiting_ += sizeof header + header.length;
  if (header.length > 0) push();
  full_ = full_ || waiting_ >= kQueue;
}

void TcpPath::flush() {
  std::lock_guard<std::mutex> lock(mutex_);
  push();
}

void TcpPath::push() {
  if (watches_room_ || write()) return;  // it goes on when there is room
  loop_.soon([self = weak_from_this()] {
    if (auto path = self.lock()) path->end("the connection broke while sending");
  });
}

bool TcpPath::write() {
  while (!frames_.empty()) {
    iovec parts[2 * kAtOnce];
    size_t count = 0;
    uint64_t skip = gone_;
    for (auto frame = frames_.begin(); frame != frames_.end() && count < 2 * kAtOnce; ++frame) {
      auto* header = reinterpret_cast<uint8_t*>(&frame->header);
      if (skip < sizeof(Header)) parts[count++] = {header + skip, sizeof(Header) - skip};
      skip -= std::min<uint64_t>(skip, sizeof(Header));
      if (frame->header.length > skip) {
        parts[count++] = {const_cast<uint8_t*>(frame->payload) + skip, frame->header.length - skip};
      }
      skip = 0;
      if (count + 2 > 2 * kAtOnce) break;
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t sent =
        tls_ ? tls_->send(message) : ::sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return false;
    if (sent < 0) break;
    waiting_ -= sent;
    gone_ += sent;
    while (!frames_.empty() && gone_ >= sizeof(Header) + frames_.front().header.length) {
      gone_ -= sizeof(Header) + frames_.front().header.length;
      frames_.pop_front();
    }
  }
  if (watches_room_ != !frames_.empty()) {
    watches_room_ = !frames_.empty();
    loop_.change(fd_, EPOLLIN | EPOLLRDHUP | (watches_room_ ? uint32_t{EPOLLOUT} : 0u));
  }
  return true;
}

void TcpPath::ready(uint32_t events) {
  auto sink = sink_.lock();
  if (!sink) return close();
  if (events & EPOLLOUT) {
    bool whole, room = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      whole = closed_ || write();
      if (full_ && waiting_ < kQueue / 2) {
        full_ = false;
        room = true;
      }
    }
    if (!whole) return end("the connection broke while sending");
    if (room) sink->roomy(*this);
  }
  if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) {
    uint64_t turn = 0;
    while (turn < kTurn && read_some(*sink)) turn += Decoder::kBuffer;
    if (turn >= kTurn && tls_ && tls_->pending()) {
      loop_.soon([self = weak_from_this()] {
        if (auto path = self.lock()) path->ready(EPOLLIN);
      });
    }
  }
}

ssize_t TcpPath::recv(void* into, size_t most) {
  return tls_ ? tls_->recv(into, most) : ::recv(fd_, into, most, MSG_DONTWAIT);
}

bool TcpPath::read_some(Sink& sink) {
  bool all = false;  // there is nothing more for now
  const ssize_t got = decoder_.read(*this, sink, [&](uint8_t* to, size_t most) {
    const ssize_t count = recv(to, most);
    all = !tls_ && most <= Decoder::kBuffer && count < static_cast<ssize_t>(most);
    return count;
  });
  if (got == 0) return end("the other side has closed the connection"), false;
  if (got < 0) {
    if (errno == EINTR) return true;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
    const bool damaged = tls_ && errno == Tls::kDamaged;
    return end(damaged ? "what was encrypted has been changed on its way" : std::strerror(errno)), false;
  }
  last_received = now();  // on a slow link a frame may take longer than a path may be silent
  if (!decoder_.fault().empty()) return end(decoder_.fault()), false;
  return !all;
}

void TcpPath::end(const std::string& why) {
  close();
  if (auto sink = sink_.lock()) sink->failed(*this, why);
}

void TcpPath::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return;
  closed_ = true;
  loop_.unwatch(fd_);
  ::shutdown(fd_, SHUT_RDWR);
  frames_.clear();
  waiting_ = 0;
}

}  // namespace adaptra
