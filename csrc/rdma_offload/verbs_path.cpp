#include "verbs_path.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <stdexcept>

namespace adaptra {

namespace {

constexpr uint64_t kPiece = 128 << 10;  // payload of a slot, at most
constexpr uint32_t kHeaders = 16;       // of frames in a slot
constexpr uint32_t kSlots = 64;
constexpr uint32_t kMostSlots = 4096;   // that another side may grant
constexpr uint32_t kWrites = 2 * kSlots;
constexpr uint32_t kGifts = 8;          // writes that only give slots back
constexpr uint32_t kGift = kSlots / 8;  // slots that are given back together
constexpr uint32_t kSignals = 8;        // of so many writes one says that it is over
constexpr uint32_t kInline = 128;
constexpr int kTurn = 64;               // completions before others have their turn
constexpr int kAtOnce = 16;
constexpr uint32_t kFrames = 1u << 31;  // in the word of a write: there are frames
constexpr uint32_t kGivenBack = 0xffff;
constexpr int kDrain = 300;             // milliseconds for the last word of a side that closes
constexpr size_t kWords = 200;          // bytes of why the other side gave up

// A write is tried 7 times; with the 0.27 s between two of them a path fails after two to eight
// seconds without an answer, depending on the device.
constexpr uint8_t kTimeout = 16, kRetries = 6;
constexpr uint8_t kNotReady = 6, kNotReadyTimer = 12;  // never needed: a receive is posted for each

[[noreturn]] void refuse(const std::string& what, int error) {
  throw std::runtime_error(what + ": " + std::strerror(error));
}

uint32_t random_bits(int bits) { return std::random_device()() & ((1u << bits) - 1); }

}  // namespace

// Little endian, 44 bytes; see docs/wire-protocol.md.
struct __attribute__((packed)) VerbsPath::Card {
  uint8_t gid[16];
  uint64_t address;
  uint32_t key, qp, psn, slots;
  uint16_t lid;
  uint8_t mtu, zero;
};

uint64_t VerbsPath::longest(uint64_t piece) { return std::min(piece, kPiece); }

VerbsPath::VerbsPath(std::shared_ptr<VerbsDevice> device, int port, int gid, uint64_t piece,
                     Loop& loop, std::weak_ptr<Sink> sink)
    : Path(0, longest(piece)),
      device_(std::move(device)),
      verbs_(device_->verbs),
      port_(port),
      loop_(loop),
      sink_(std::move(sink)),
      slot_(kHeaders * sizeof(Header) + longest_piece),
      psn_(random_bits(24)),
      address_(device_->address(port, gid)),
      attributes_(device_->attributes(port)) {
  const std::string name = "port " + std::to_string(port) + " of " + device_->name;
  if (!address_.active) throw std::runtime_error(name + " is down here");
  if (address_.gid_index < 0) throw std::runtime_error(name + ": " + address_.why);
  try {
    const uint64_t slots = (kSlots * slot_ + 4095) / 4096 * 4096;
    memory_bytes_ = slots + (kWrites + kGifts) * kHeaders * sizeof(Header);
    void* memory = mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) refuse("memory for slots", errno);
    memory_ = static_cast<uint8_t*>(memory);
    slots_ = verbs_.reg_mr(device_->pd, memory_, slots, ibv::kLocalWrite | ibv::kRemoteWrite);
    if (slots_ != nullptr) {
      headers_ = verbs_.reg_mr(device_->pd, memory_ + slots, memory_bytes_ - slots, 0);
    }
    if (headers_ == nullptr) {
      refuse(device_->name + " cannot register memory (`ulimit -l` should say unlimited)", errno);
    }
    channel_ = verbs_.create_channel(device_->context);
    if (channel_ == nullptr) refuse("a completion channel of " + device_->name, errno);
    fcntl(channel_->fd, F_SETFL, fcntl(channel_->fd, F_GETFL) | O_NONBLOCK);
    cq_ = verbs_.create_cq(device_->context, kWrites + kGifts + kSlots + kGifts, nullptr, channel_, 0);
    if (cq_ == nullptr) refuse("a completion queue of " + device_->name, errno);
    ibv::QpInit init{};
    init.send_cq = init.receive_cq = cq_;
    init.capacity = {kWrites + kGifts, kSlots + kGifts, 3, 1, kInline};
    init.type = ibv::kRc;
    qp_ = verbs_.create_qp(device_->pd, &init);
    if (qp_ == nullptr) {
      init.capacity.max_inline = 0;
      qp_ = verbs_.create_qp(device_->pd, &init);
    }
    if (qp_ == nullptr) refuse("a queue pair of " + device_->name, errno);
    inline_ = init.capacity.max_inline;
    ibv::QpAttributes to{};
    to.state = ibv::kInit;
    to.port = static_cast<uint8_t>(port_);
    to.access_flags = ibv::kRemoteWrite;
    const int error = verbs_.modify_qp(
        qp_, &to, ibv::kState | ibv::kPkeyIndex | ibv::kPort | ibv::kAccessFlags);
    if (error != 0) refuse("a queue pair of " + device_->name, error);
    for (uint32_t n = 0; n < kSlots + kGifts; ++n) {
      if (!post_receive()) refuse("receives of " + device_->name, errno);
    }
    cq_->context->ops.request_notify(cq_, 0);
  } catch (...) {
    destroy();
    throw;
  }
}

VerbsPath::~VerbsPath() { destroy(); }

void VerbsPath::destroy() {
  if (qp_ != nullptr) verbs_.destroy_qp(qp_);
  if (cq_ != nullptr) verbs_.destroy_cq(cq_);
  if (channel_ != nullptr) verbs_.destroy_channel(channel_);
  if (headers_ != nullptr) verbs_.dereg_mr(headers_);
  if (slots_ != nullptr) verbs_.dereg_mr(slots_);
  if (memory_ != nullptr) munmap(memory_, memory_bytes_);
  if (socket_ >= 0) ::close(socket_);
}

std::string VerbsPath::card() const {
  Card card{};
  std::memcpy(card.gid, address_.gid.data(), sizeof card.gid);
  card.address = reinterpret_cast<uintptr_t>(memory_);
  card.key = slots_->rkey;
  card.qp = qp_->number;
  card.psn = psn_;
  card.slots = kSlots;
  card.lid = attributes_.lid;
  card.mtu = static_cast<uint8_t>(attributes_.active_mtu);
  return {reinterpret_cast<const char*>(&card), sizeof card};
}

void VerbsPath::connect(const std::string& words) {
  Card card;
  if (words.size() != sizeof card) throw std::runtime_error("this is no card of a queue pair");
  std::memcpy(&card, words.data(), sizeof card);
  if (card.slots == 0 || card.slots > kMostSlots || card.mtu < 1 || card.mtu > 5) {
    throw std::runtime_error("a card with " + std::to_string(card.slots) + " slots and MTU " +
                             std::to_string(card.mtu));
  }
  granted_ = their_count_ = card.slots;
  their_address_ = card.address;
  their_key_ = card.key;

  ibv::QpAttributes to{};
  to.state = ibv::kReadyToReceive;
  to.path_mtu = std::min<int>(card.mtu, attributes_.active_mtu);
  to.destination_qp = card.qp;
  to.rq_psn = card.psn;
  to.min_rnr_timer = kNotReadyTimer;
  to.address.port = static_cast<uint8_t>(port_);
  to.address.dlid = card.lid;
  if (attributes_.link_layer == ibv::kEthernet) {
    to.address.is_global = 1;
    std::memcpy(to.address.route.dgid.raw, card.gid, sizeof card.gid);
    to.address.route.sgid_index = static_cast<uint8_t>(address_.gid_index);
    to.address.route.hop_limit = 64;
  }
  int error = verbs_.modify_qp(qp_, &to,
                               ibv::kState | ibv::kAddress | ibv::kPathMtu | ibv::kDestinationQp |
                                   ibv::kRqPsn | ibv::kMaxReadsHere | ibv::kMinRnrTimer);
  if (error != 0) refuse(device_->name + " finds no way to the other side", error);
  to.state = ibv::kReadyToSend;
  to.timeout = kTimeout;
  to.retry_count = kRetries;
  to.rnr_retry = kNotReady;
  to.sq_psn = psn_;
  error = verbs_.modify_qp(qp_, &to,
                           ibv::kState | ibv::kTimeout | ibv::kRetryCount | ibv::kRnrRetry |
                               ibv::kSqPsn | ibv::kMaxReads);
  if (error != 0) refuse(device_->name + " cannot send", error);
}

void VerbsPath::start(int socket) {
  auto self = weak_from_this();
  std::lock_guard<std::mutex> lock(mutex_);
  socket_ = socket;
  if (closed_) return;
  device_->watch(qp_, port_, [self](const std::string& why) {
    if (auto path = self.lock()) path->end(why);
  });
  loop_.watch(channel_->fd, EPOLLIN, [self](uint32_t) {
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
    if (!path->active()) path->end(path->words(ibv::kFlushed));
  });
}

bool VerbsPath::has_room() const {
  return !closed_ && (granted_ > 0 || gathered_ > 0) && posted_ - completed_ < kWrites;
}

bool VerbsPath::takes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return has_room();
}

uint64_t VerbsPath::waiting() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return waiting_;
}

void VerbsPath::send(const Header& header, const uint8_t* payload, std::shared_ptr<void> keep) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!has_room()) return;  // its end is on the way to the peer
  Header* headers = this->headers();
  if (gathered_ == 0) --granted_;
  headers[gathered_++] = header;
  if (header.length == 0) {
    if (!gathers_ || gathered_ == kHeaders || header.kind == Kind::Bye) flush();
    return;
  }
  const uint32_t before = gathered_ * sizeof header;
  const bool inlined = before + header.length <= inline_;
  ibv::Sge sges[3] = {{reinterpret_cast<uintptr_t>(headers), before, headers_->lkey}};
  int count = 1;
  try {
    for (uint64_t done = 0, part; done < header.length; done += part, ++count) {
      part = header.length - done;
      const uint32_t key = inlined ? 0 : device_->key(payload + done, &part);
      sges[count] = {reinterpret_cast<uintptr_t>(payload + done), static_cast<uint32_t>(part), key};
    }
  } catch (const std::runtime_error& error) {
    return fail_soon(error.what());
  }
  written_.push_back({frames_, header.length, std::move(keep)});
  waiting_ += header.length;
  write(sges, count, inlined);
  full_ = full_ || !has_room();
}

// Where the headers of the next write stand until it is over.
Header* VerbsPath::headers() const {
  constexpr uint64_t kRing = kWrites + kGifts;
  auto* end = reinterpret_cast<Header*>(memory_ + memory_bytes_);
  return end - kRing * kHeaders + posted_ % kRing * kHeaders;
}

// Write the frames that were gathered, or nothing: slots go back with either.
void VerbsPath::flush() {
  const uint32_t bytes = gathered_ * sizeof(Header);
  ibv::Sge sge{reinterpret_cast<uintptr_t>(headers()), bytes, headers_->lkey};
  write(&sge, bytes > 0 ? 1 : 0, bytes <= inline_);
  full_ = full_ || !has_room();
}

void VerbsPath::write(ibv::Sge* sges, int count, bool inlined) {
  const bool frames = gathered_ > 0;
  ibv::SendWr wr{}, *bad;
  wr.id = posted_;
  wr.sges = sges;
  wr.sge_count = count;
  wr.opcode = ibv::kRdmaWriteWithImm;
  if (inlined) wr.flags |= ibv::kInline;
  if (posted_ % kSignals == 0 || (frames && headers()[gathered_ - 1].kind == Kind::Bye)) {
    wr.flags |= ibv::kSignaled;
    signaled_ = posted_ + 1;
  }
  wr.immediate = htonl((frames ? kFrames : 0) | free_);
  wr.remote.address = their_address_ + (frames ? frames_++ % their_count_ * slot_ : 0);
  wr.remote.rkey = their_key_;
  free_ = gathered_ = 0;
  ++posted_;
  const int error = qp_->context->ops.post_send(qp_, &wr, &bad);
  if (error != 0) {
    fail_soon(device_->name + " takes no more writes: " + std::strerror(error));
  }
}

// A path calls nobody from within `send`.
void VerbsPath::fail_soon(std::string why) {
  loop_.soon([self = weak_from_this(), why = std::move(why)] {
    if (auto path = self.lock()) path->end(why);
  });
}

bool VerbsPath::post_receive() {
  ibv::ReceiveWr wr{}, *bad;
  return qp_->context->ops.post_receive(qp_, &wr, &bad) == 0;
}

void VerbsPath::ready() {
  auto sink = sink_.lock();
  if (!sink) return close();
  ibv::Cq* cq;
  void* user;
  if (verbs_.get_cq_event(channel_, &cq, &user) == 0) {  // one at most, of the last request
    verbs_.ack_cq_events(cq_, 1);
    cq_->context->ops.request_notify(cq_, 0);  // before the last look, so that none is missed
  }
  gather(true);
  ibv::Completion found[kAtOnce];
  int count, turn = 0;
  while ((count = cq_->context->ops.poll_cq(cq_, kAtOnce, found)) > 0) {
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
  if (gather(false)) sink->roomy(*this);
}

// From now on frames without payload are gathered for one write, or they are written. Whether there
// is room again, after there was none.
bool VerbsPath::gather(bool yes) {
  std::lock_guard<std::mutex> lock(mutex_);
  gathers_ = yes;
  if (closed_) return false;
  if (!yes && gathered_ > 0) flush();
  give();
  const bool room = full_ && has_room();
  if (room) full_ = false;
  return room;
}

bool VerbsPath::completed(Sink& sink, const ibv::Completion& completion) {
  if (completion.status != ibv::kSuccess) return end(words(completion.status)), false;
  if (completion.opcode & ibv::kReceived) return received(sink, completion);
  std::lock_guard<std::mutex> lock(mutex_);
  completed_ = completion.id + 1;  // and so are those before it
  return true;
}

// What was in a slot that comes back has been read; its memory here is free, whether or not the
// device has said that it is over.
bool VerbsPath::given_back(uint32_t slots) {
  granted_ += slots;
  if (granted_ > their_count_) return false;
  const uint64_t read = frames_ - (their_count_ - granted_);
  while (!written_.empty() && written_.front().frame < read) {
    waiting_ -= written_.front().bytes;
    written_.pop_front();
  }
  return true;
}

bool VerbsPath::received(Sink& sink, const ibv::Completion& completion) {
  heard = now();
  const uint32_t word = ntohl(completion.immediate);
  bool used;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return false;
    used = given_back(word & kGivenBack);
  }
  if (!used) return end("more slots came back than were used"), false;
  if (!post_receive()) return end("a receive cannot be posted"), false;
  if (!(word & kFrames)) return true;
  const uint8_t* at = memory_ + received_++ % kSlots * slot_;
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
    if (!sink.arrived(*this, header)) return end("a frame against the protocol"), false;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  ++free_;
  if (!closed_) give();
  return true;
}

// Slots go back with frames, or alone where these are many and nothing else goes that way.
void VerbsPath::give() {
  if (free_ >= kGift && posted_ - completed_ < kWrites + kGifts) flush();
}

bool VerbsPath::active() const {
  ibv::PortAttributes attributes{};
  return verbs_.query_port(device_->context, port_, &attributes) == 0 &&
         attributes.state == ibv::kPortActive;
}

std::string VerbsPath::words(int status) const {
  const std::string port = "port " + std::to_string(port_) + " of " + device_->name;
  if (!active()) return port + " is down here";
  if (status == ibv::kRetryExceeded || status == ibv::kRnrRetryExceeded) {
    return "the other side does not answer over " + port;
  }
  const bool theirs = status >= ibv::kRemoteFirst && status <= ibv::kRemoteLast;
  return port + " fails " + (theirs ? "at the other side: " : "here: ") + verbs_.status_text(status);
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
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return;
  closed_ = true;
  loop_.unwatch(channel_->fd);
  device_->unwatch(qp_);
  drain();
  ibv::QpAttributes to{};
  to.state = ibv::kError;
  verbs_.modify_qp(qp_, &to, ibv::kState);  // nothing is written here any more
  if (socket_ >= 0) {
    loop_.unwatch(socket_);
    ::shutdown(socket_, SHUT_RDWR);
  }
}

// Let the last word of this side get out.
void VerbsPath::drain() {
  const Nanoseconds until = now() + kDrain * 1000000ull;
  while (completed_ < signaled_ && now() < until) {
    ibv::Completion one;
    const int count = cq_->context->ops.poll_cq(cq_, 1, &one);
    if (count < 0 || (count > 0 && one.status != ibv::kSuccess)) return;
    if (count > 0) {
      if (!(one.opcode & ibv::kReceived)) completed_ = one.id + 1;
      continue;
    }
    ::poll(nullptr, 0, 1);
  }
}

}  // namespace adaptra
