#include "shm/shm_path.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace adaptra {

namespace {

void* mapped(int ring, size_t bytes) {
  if (sealed(ring) != bytes) throw std::runtime_error("the ring is not one");
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring, 0);
  if (base == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  return base;
}

}  // namespace

int ShmPath::new_ring() {
  const int fd = memfd_create("adaptra-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0 || ftruncate(fd, 2 * sizeof(RingHalf)) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    throw std::system_error(errno, std::generic_category(), "memory for a ring");
  }
  return fd;
}

ShmPath::ShmPath(ShmEnds ends, bool first, uint64_t piece, std::shared_ptr<Arena> arena,
                 Loop& loop, std::weak_ptr<Sink> sink)
    : Path(0, piece),
      socket_(std::move(ends.socket)),
      arena_(std::move(arena)),
      view_(ends.arena),
      loop_(loop),
      sink_(std::move(sink)),
      halves_(static_cast<RingHalf*>(mapped(ends.ring, 2 * sizeof(RingHalf)))),
      out_(halves_[first ? 0 : 1]),
      in_(halves_[first ? 1 : 0]) {}

ShmPath::~ShmPath() {
  munmap(halves_, 2 * sizeof(RingHalf));
}

void ShmPath::start() {
  auto self = weak_from_this();
  std::lock_guard<std::mutex> lock(closing_);
  if (closed_) return;
  loop_.watch(socket_, EPOLLIN | EPOLLRDHUP, [self](uint32_t events) {
    auto path = self.lock();
    if (!path) return;
    if (!(events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))) return path->ready();
    path->ready(kSlots);  // what it has sent before its end
    path->end("the other process has ended");
  });
  loop_.soon([self] {
    if (auto path = self.lock()) path->ready();
  });
}

bool ShmPath::takes() const {
  if (closed_) return false;
  if (pushed_ - out_.popped.load() < kSlots) return true;
  out_.writer_waits.store(1);
  return pushed_ - out_.popped.load() < kSlots;  // it may have been read just before
}

uint64_t ShmPath::waiting() const { return pushed_ - out_.popped.load(); }

// Under the peer's lock, so there is one writer.
void ShmPath::send(const Header& header, const uint8_t* payload, std::shared_ptr<void>) {
  Slot& slot = out_.slots[pushed_ % kSlots];
  slot.header = header;
  slot.at = header.length > 0 ? arena_->offset(payload) : 0;
  out_.pushed.store(++pushed_);
  if (out_.reader_sleeps.exchange(0)) ring();
}

void ShmPath::ready(uint64_t most) {
  char rung[256];
  [[maybe_unused]] const ssize_t read = ::recv(socket_, rung, sizeof rung, MSG_DONTWAIT);
  auto sink = sink_.lock();
  if (!sink) return close();
  uint64_t turn = 0;
  while (!closed_) {
    if (in_.pushed.load() == popped_) {
      in_.reader_sleeps.store(1);
      if (in_.pushed.load() == popped_) break;
      in_.reader_sleeps.store(0);
    }
    if (!pop(*sink)) return;
    if (++turn == most) {
      loop_.soon([self = weak_from_this()] {
        if (auto path = self.lock()) path->ready();
      });
      break;
    }
  }
  if (!closed_) sink->roomy(*this);
}

bool ShmPath::pop(Sink& sink) {
  if (in_.pushed.load() - popped_ > kSlots) return end("the ring is damaged"), false;
  const Slot slot = in_.slots[popped_ % kSlots];  // a copy: the other side can still write there
  std::atomic_signal_fence(std::memory_order_seq_cst);  // nor does the compiler look there again
  const Header& header = slot.header;
  std::string fault = fault_of(header, longest_piece);
  const uint8_t* payload = view_.at(slot.at, header.length);
  if (fault.empty() && payload == nullptr) fault = "a payload outside its memory";
  if (!fault.empty()) return end(fault), false;
  if (header.length > 0) {
    sink.fill(header, 0, [&](uint8_t* to) -> ssize_t {
      if (to != nullptr) std::memcpy(to, payload, header.length);
      return header.length;
    });
  }
  const bool stale = header.length > 0 && in_.closed.load();  // its memory may hold something else
  in_.popped.store(++popped_);
  if (in_.writer_waits.exchange(0)) ring();
  if (stale) return true;
  if (!sink.arrived(*this, header)) return end("a frame against the protocol"), false;
  return true;
}

// Where no byte fits any more, enough of them are waiting.
void ShmPath::ring() {
  [[maybe_unused]] const ssize_t sent = ::send(socket_, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void ShmPath::end(const std::string& why) {
  if (closed_) return;
  close();
  if (auto sink = sink_.lock()) sink->failed(*this, why);
}

void ShmPath::close() {
  std::lock_guard<std::mutex> lock(closing_);
  if (closed_.exchange(true)) return;
  out_.closed.store(1);
  loop_.unwatch(socket_);
  ::shutdown(socket_, SHUT_RDWR);
}

}  // namespace adaptra
