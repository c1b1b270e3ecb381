#include "verbs/verbs_path.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

namespace adaptra {

namespace {

constexpr uint64_t kPiece = 128 << 10;  // payload of a slot, at most
constexpr uint32_t kHeaders = 16;       // of frames in a slot
constexpr uint32_t kSlots = 64;         // at first: 8 MiB
constexpr uint32_t kMostSlots = 512;    // over a long link: 64 MiB
constexpr uint32_t kFewest = 8;         // of each connection, where a port has several to one peer
constexpr uint32_t kGifts = 8;          // writes that only give slots back, at most
constexpr uint32_t kSignals = 32;       // of so many writes one says that it is over
constexpr uint32_t kInline = 128;
constexpr Nanoseconds kSlow = 20000;    // more than a thread needs to wake up
constexpr int kTurn = 64;               // completions before others have their turn
constexpr int kAtOnce = 16;
constexpr uint32_t kFrames = 1u << 31;  // in the word of a write: there are frames
constexpr uint32_t kWants = 1u << 30;   // its sender could use more slots
constexpr uint32_t kSlotAt = 16, kSlotBits = 0xfff;
constexpr uint32_t kGivenBack = 0xffff;
constexpr int kDrain = 300;             // milliseconds for the last word of a side that closes
constexpr size_t kWords = 200;          // bytes of why the other side gave up

uint32_t share(uint32_t slots, uint32_t connections) {
  return std::max(slots / std::max(1u, connections), kFewest);
}

VerbsSizes sizes(uint64_t piece, uint32_t connections) {
  const uint64_t headers = kHeaders * sizeof(Header);
  const uint32_t most = share(kMostSlots, connections);
  return {share(kSlots, connections), most, headers + piece, most + 2 * kSignals + kGifts, headers,
          most + kGifts, kInline};
}

}  // namespace

uint64_t VerbsPath::longest(uint64_t piece) { return std::min(piece, kPiece); }

VerbsPath::VerbsPath(std::shared_ptr<VerbsDevice> device, int port, int gid, const VerbsChoice& which,
                     VerbsService service, uint64_t piece, Loop& loop, std::weak_ptr<Sink> sink)
    : Path(0, longest(piece)),
      loop_(loop),
      sink_(std::move(sink)),
      sizes_(sizes(longest_piece, service.connections)),
      qp_(std::move(device), port, gid, which, service, sizes_) {}

void VerbsPath::connect(const std::string& card) {
  qp_.connect(card);
  std::lock_guard<std::mutex> lock(mutex_);
  use(qp_.theirs());
}

void VerbsPath::use(const VerbsSlots& slots) {
  for (uint32_t n = 0; n < slots.count; ++n) open_.push_back(slots_ + n);
  slots_ += slots.count;
  theirs_.push_back(slots);
}

void VerbsPath::start(Owned socket) {
  auto self = weak_from_this();
  std::lock_guard<std::mutex> lock(mutex_);
  socket_ = std::move(socket);
  if (closed_) return;
  qp_.watch([self](const std::string& why) {
    if (auto path = self.lock()) path->end(why);
  });
  loop_.watch(qp_.fd(), EPOLLIN, [self](uint32_t) {
    if (auto path = self.lock()) path->ready();
  });
  loop_.watch(socket_, EPOLLIN | EPOLLRDHUP, [self](uint32_t) {
    auto path = self.lock();
    if (!path) return;
    path->ready();  // what it has written before its end
    char words[kWords];
    const ssize_t got = ::recv(path->socket_, words, sizeof words, MSG_DONTWAIT);
    path->end(got > 0 ? "the other side says: " + std::string(words, got)
                      : std::string("the other side has ended"));
  });
  loop_.soon([self] {  // a port may have gone down before it was watched
    auto path = self.lock();
    if (!path) return;
    path->ready();
    if (!path->qp_.active()) path->end(path->words(ibv::kFlushed));
  });
}

bool VerbsPath::has_room() const {
  return !closed_ && (!open_.empty() || gathered_ > 0) && posted_ - completed_ < sizes_.writes - kGifts;
}

bool VerbsPath::takes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return has_room();
}

uint64_t VerbsPath::waiting() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return waiting_;
}

Nanoseconds VerbsPath::due(uint64_t bytes) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return speed_.due(waiting_ + bytes, now());
}

void VerbsPath::gather_frame(const Header& header) {
  if (gathered_ == 0) {
    slot_of_next_ = open_.front();
    open_.pop_front();
    short_ = short_ || open_.empty();
  }
  headers()[gathered_++] = header;
}

void VerbsPath::send(const Header& header, const uint8_t* payload, std::shared_ptr<void> keep) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!has_room()) return;  // its end is on the way to the peer
  gather_frame(header);
  if (header.length == 0) {
    if (gathered_ == kHeaders || header.kind == Kind::Bye) {
      write_gathered();
      hand_over(lock);
    }
    return;
  }
  const uint32_t before = gathered_ * sizeof header;
  const bool inlined = before + header.length <= qp_.inlined();
  Write next;
  next.sges[0] = {reinterpret_cast<uintptr_t>(headers()), before, qp_.headers_key()};
  next.wr.sge_count = 1;
  try {
    for (uint64_t done = 0, part; done < header.length; done += part) {
      part = header.length - done;
      const uint32_t key = inlined ? 0 : qp_.device->key(payload + done, &part);
      next.sges[next.wr.sge_count++] = {reinterpret_cast<uintptr_t>(payload + done),
                                        static_cast<uint32_t>(part), key};
    }
  } catch (const std::runtime_error& error) {
    return fail_soon(error.what());
  }
  write(next, inlined, header.length, std::move(keep));
  full_ = full_ || !has_room();
  hand_over(lock);
}

// Have the device get what was written. If that takes long (one of software sends within the call),
// the loop's thread does it, and no sender waits.
void VerbsPath::hand_over(std::unique_lock<std::mutex>& lock) {
  if (!slow_) return post(lock);
  if (gathers_ || posts_ || posts_soon_) return;
  posts_soon_ = true;
  loop_.soon([self = weak_from_this()] {
    auto path = self.lock();
    if (!path) return;
    std::unique_lock<std::mutex> lock(path->mutex_);
    path->posts_soon_ = false;
    path->post(lock);
  });
}

void VerbsPath::flush() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (closed_ || gathers_ || gathered_ == 0) return;
  write_gathered();
  hand_over(lock);
}

Header* VerbsPath::headers() const { return reinterpret_cast<Header*>(qp_.headers(posted_)); }

void VerbsPath::write_gathered() {
  const uint32_t bytes = gathered_ * sizeof(Header);
  Write next;
  next.sges[0] = {reinterpret_cast<uintptr_t>(headers()), bytes, qp_.headers_key()};
  next.wr.sge_count = bytes > 0;
  write(next, bytes <= qp_.inlined(), 0, nullptr);
  full_ = full_ || !has_room();
}

void VerbsPath::write(Write& next, bool inlined, uint64_t payload, std::shared_ptr<void> keep) {
  const bool frames = gathered_ > 0;
  ibv::SendWr& wr = next.wr;
  wr.id = posted_;
  wr.opcode = ibv::kRdmaWriteWithImm;
  if (inlined) wr.flags |= ibv::kInline;
  if (posted_ % kSignals == 0 || (frames && headers()[gathered_ - 1].kind == Kind::Bye)) {
    wr.flags |= ibv::kSignaled;
    signaled_ = posted_ + 1;
  }
  uint32_t word = free_ | (wants_ ? kWants : 0);
  uint32_t at = 0;
  if (frames) {
    at = slot_of_next_;
    word |= kFrames | at << kSlotAt;
    written_.push_back({at, payload, speed_.send(now()), std::move(keep)});
    waiting_ += payload;
  }
  wr.immediate = htonl(word);
  auto slots = theirs_.begin();
  for (; at >= slots->count; ++slots) at -= slots->count;
  wr.remote.address = slots->address + at * sizes_.slot;
  wr.remote.rkey = slots->key;
  free_ = gathered_ = 0;
  wants_ = false;
  ++posted_;
  writes_.push_back(next);
}

void VerbsPath::post(std::unique_lock<std::mutex>& lock) {
  std::vector<Write> writes;
  while (!writes_.empty() && !posts_) {
    posts_ = true;
    writes.clear();
    writes.swap(writes_);
    lock.unlock();
    for (size_t n = 0; n < writes.size(); ++n) {
      writes[n].wr.sges = writes[n].sges;
      writes[n].wr.next = n + 1 < writes.size() ? &writes[n + 1].wr : nullptr;
    }
    const Nanoseconds begin = now();
    const int error = qp_.post(writes[0].wr);
    slow_ = now() - begin > kSlow;
    lock.lock();
    posts_ = false;
    gave_.notify_all();
    if (error != 0) {
      fail_soon(qp_.name() + " takes no more writes: " + std::strerror(error));
    }
  }
}

// A path does not call its sink from within `send`.
void VerbsPath::fail_soon(std::string why) {
  loop_.soon([self = weak_from_this(), why = std::move(why)] {
    if (auto path = self.lock()) path->end(why);
  });
}

void VerbsPath::ready() {
  auto sink = sink_.lock();
  if (!sink) return close();
  qp_.take_event();  // before the last look, so that nothing is missed
  gather(true);
  ibv::Completion found[kAtOnce];
  int count, turn = 0;
  while ((count = qp_.poll(found, kAtOnce)) > 0) {
    for (int n = 0; n < count; ++n) {
      if (!completed(*sink, found[n])) return;
    }
    if ((turn += count) >= kTurn) {
      loop_.soon([self = weak_from_this()] {
        if (auto path = self.lock()) path->ready();
      });
      break;
    }
  }
  if (room_again()) sink->roomy(*this);
  gather(false);
}

bool VerbsPath::room_again() {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool room = full_ && has_room();
  if (room) full_ = false;
  return room;
}

void VerbsPath::gather(bool yes) {
  std::unique_lock<std::mutex> lock(mutex_);
  gathers_ = yes;
  if (closed_) return;
  if (!yes && offer_ && has_room()) {
    gather_frame(*offer_);
    offer_.reset();
  }
  if (!yes && gathered_ > 0) write_gathered();
  give();
  post(lock);
}

bool VerbsPath::completed(Sink& sink, const ibv::Completion& completion) {
  if (completion.status != ibv::kSuccess) return end(words(completion.status)), false;
  if (completion.opcode & ibv::kReceived) return received(sink, completion);
  std::lock_guard<std::mutex> lock(mutex_);
  completed_ = completion.id + 1;  // and so are those before it
  return true;
}

// What was in a slot that comes back has been read; its memory here is free, whether or not the
// device has reported the write as over.
bool VerbsPath::given_back(uint32_t slots) {
  if (slots > written_.size()) return false;
  const Nanoseconds time = slots > 0 ? now() : 0;
  for (; slots > 0; --slots) {
    const Written& one = written_.front();
    speed_.arrived(one.sent, one.bytes, time);
    waiting_ -= one.bytes;
    open_.push_back(one.slot);
    written_.pop_front();
  }
  if (short_ && !open_.empty()) {
    short_ = false;
    // A round trip carries half of them or more, so they may be what bounds it, and not the link.
    const bool few = 2 * speed_.trip() >= slots_ * longest_piece;
    if (few && !asked_) wants_ = asked_ = true;
  }
  return true;
}

bool VerbsPath::granted(const Header& header) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!asked_ || header.total > kSlotBits + 1 - slots_) return false;
  if (header.total == 0) return true;  // there are no more: it is not asked again
  asked_ = false;
  use({header.offset, static_cast<uint32_t>(header.tag), static_cast<uint32_t>(header.total)});
  return true;
}

bool VerbsPath::received(Sink& sink, const ibv::Completion& completion) {
  last_received = now();
  const uint32_t word = ntohl(completion.immediate);
  bool used;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return false;
    used = given_back(word & kGivenBack);
  }
  if (!used) return end("more slots came back than were used"), false;
  if (!qp_.post_receive()) return end("a receive cannot be posted"), false;
  if (word & kWants) offer();
  if (!(word & kFrames)) return true;
  if (completion.bytes > sizes_.slot) return end("a write of more than a slot"), false;
  const uint8_t* at = qp_.slot(word >> kSlotAt & kSlotBits);
  if (at == nullptr) return end("a write to a slot that there is not"), false;
  const uint8_t* end_of_frames = at + completion.bytes;
  while (at < end_of_frames) {
    Header header;  // a copy: the other side can still write there
    std::memcpy(&header, at, sizeof header);
    at += sizeof header;
    std::string fault = fault_of(header, longest_piece);
    if (fault.empty() && at + header.length > end_of_frames) fault = "a frame that is cut";
    if (!fault.empty()) return end(fault), false;
    if (header.length > 0) {
      sink.fill(header, 0, [&](uint8_t* to) -> ssize_t {
        if (to != nullptr) std::memcpy(to, at, header.length);
        return header.length;
      });
    }
    at += header.length;
    if (header.kind == Kind::Slots) {
      if (!granted(header)) return end("slots that were not asked for"), false;
      continue;
    }
    if (!sink.arrived(*this, header)) return end("a frame against the protocol"), false;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  ++free_;
  if (closed_) return true;
  give();
  post(lock);
  return true;
}

void VerbsPath::offer() {
  const VerbsSlots more = qp_.grow();
  Header header;
  header.kind = Kind::Slots;
  header.offset = more.address;
  header.tag = more.key;
  header.total = more.count;
  std::lock_guard<std::mutex> lock(mutex_);
  offer_ = header;  // with `gather`, once there is room
}

void VerbsPath::give() {
  const uint32_t together = sizes_.slots / 4;
  if (free_ >= together && posted_ - completed_ < sizes_.writes) write_gathered();
}

std::string VerbsPath::words(int status) const {
  const std::string port = qp_.name();
  if (!qp_.active()) return port + " is down here";
  if (status == ibv::kRetryExceeded || status == ibv::kRnrRetryExceeded) {
    return "the other side does not answer over " + port;
  }
  const bool theirs = status >= ibv::kRemoteFirst && status <= ibv::kRemoteLast;
  return port + " fails " + (theirs ? "at the other side: " : "here: ") +
         qp_.device->verbs.status_text(status);
}

void VerbsPath::end(const std::string& why) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    ::send(socket_, why.data(), std::min(why.size(), kWords), MSG_DONTWAIT | MSG_NOSIGNAL);
    signaled_ = 0;  // what is under way is lost: nothing to wait for
  }
  close();
  if (auto sink = sink_.lock()) sink->failed(*this, why);
}

void VerbsPath::close() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (closed_) return;
  closed_ = true;
  gave_.wait(lock, [this] { return !posts_; });
  post(lock);
  loop_.unwatch(qp_.fd());
  qp_.unwatch();
  drain();
  qp_.stop();
  if (socket_ >= 0) {
    loop_.unwatch(socket_);
    ::shutdown(socket_, SHUT_RDWR);
  }
}

void VerbsPath::drain() {
  const Nanoseconds until = now() + kDrain * 1000000ull;
  while (completed_ < signaled_ && now() < until) {
    ibv::Completion one;
    const int count = qp_.poll(&one, 1);
    if (count < 0 || (count > 0 && one.status != ibv::kSuccess)) return;
    if (count > 0) {
      if (!(one.opcode & ibv::kReceived)) completed_ = one.id + 1;
      continue;
    }
    ::poll(nullptr, 0, 1);
  }
}

}  // namespace adaptra
