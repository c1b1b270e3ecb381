#include "verbs/verbs_qp.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <stdexcept>

namespace adaptra {

namespace {

constexpr uint32_t kMostSlots = 4096; // that another side may grant

constexpr uint8_t kHops = 64;  // between subnets
constexpr uint8_t kNotReady = 6, kNotReadyTimer = 12;  // never needed: a receive is posted for each

[[noreturn]] void refuse(const std::string& what, int error) {
  throw std::runtime_error(what + ": " + std::strerror(error));
}

const uint8_t* raw(const VerbsPort& port) {
  return reinterpret_cast<const uint8_t*>(port.gid.data());
}

bool is_zero(const uint8_t* gid) {
  return std::all_of(gid, gid + sizeof(ibv::Gid), [](uint8_t byte) { return byte == 0; });
}

uint32_t random_bits(int bits) { return std::random_device()() & ((1u << bits) - 1); }

bool same_subnet(const uint8_t* one, const uint8_t* other) {
  const int from = of_a_site(one) && of_a_site(other) ? 6 : 0;
  return std::memcmp(one + from, other + from, 8 - from) == 0;
}

}  // namespace

// Little endian, 124 bytes; see docs/wire-protocol.md.
struct __attribute__((packed)) VerbsQp::Card {
  uint8_t gids[kKinds][16];  // zeros for none
  uint64_t address;
  uint32_t key, qp, psn, slots;
  uint16_t lid;
  uint8_t mtu, zero;
};

VerbsQp::VerbsQp(std::shared_ptr<VerbsDevice> opened, int port, int gid, const VerbsChoice& which,
                 VerbsService service, VerbsSizes sizes)
    : device(std::move(opened)),
      verbs_(device->verbs),
      port_(port),
      service_(service),
      sizes_(sizes),
      psn_(random_bits(24)),
      addresses_(device->addresses(port, gid, which)),
      attributes_(device->attributes(port)) {
  const VerbsPort& best = addresses_.front();
  if (!best.active) throw std::runtime_error(name() + " is down here");
  if (best.gid_index < 0) throw std::runtime_error(name() + ": " + best.why);
  if (service_.partition >= attributes_.pkey_count) {
    throw std::runtime_error(name() + " has " + std::to_string(attributes_.pkey_count) +
                             " partition keys, from 0 on, and none at " +
                             std::to_string(service_.partition) + " (NCCL_IB_PKEY)");
  }
  try {
    open();
  } catch (...) {
    destroy();
    throw;
  }
}

void VerbsQp::open() {
  headers_ = region(uint64_t{sizes_.writes} * sizes_.headers, 0);
  grant(sizes_.slots);
  channel_ = verbs_.create_channel(device->context);
  if (channel_ == nullptr) refuse("a completion channel of " + device->name, errno);
  fcntl(channel_->fd, F_SETFL, fcntl(channel_->fd, F_GETFL) | O_NONBLOCK);
  cq_ = verbs_.create_cq(device->context, sizes_.writes + sizes_.receives, nullptr, channel_, 0);
  if (cq_ == nullptr) refuse("a completion queue of " + device->name, errno);
  ibv::QpInit init{};
  init.send_cq = init.receive_cq = cq_;
  init.capacity = {sizes_.writes, sizes_.receives, 3, 1, sizes_.inlined};
  init.type = ibv::kRc;
  qp_ = verbs_.create_qp(device->pd, &init);
  if (qp_ == nullptr) {
    init.capacity.max_inline = 0;
    qp_ = verbs_.create_qp(device->pd, &init);
  }
  if (qp_ == nullptr) refuse("a queue pair of " + device->name, errno);
  inlined_ = init.capacity.max_inline;
  ibv::QpAttributes to{};
  to.state = ibv::kInit;
  to.port = static_cast<uint8_t>(port_);
  to.pkey_index = service_.partition;
  to.access_flags = ibv::kRemoteWrite;
  const int error = verbs_.modify_qp(
      qp_, &to, ibv::kState | ibv::kPkeyIndex | ibv::kPort | ibv::kAccessFlags);
  if (error != 0) refuse("a queue pair of " + device->name, error);
  for (uint32_t n = 0; n < sizes_.receives; ++n) {
    if (!post_receive()) refuse("receives of " + device->name, errno);
  }
  cq_->context->ops.request_notify(cq_, 0);
}

VerbsQp::Region VerbsQp::region(uint64_t bytes, int access) const {
  bytes = (bytes + 4095) / 4096 * 4096;
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) refuse("memory for slots", errno);
  ibv::Mr* registered = verbs_.reg_mr(device->pd, memory, bytes, access);
  if (registered == nullptr) {
    const int error = errno;
    munmap(memory, bytes);
    refuse(device->name + " cannot register memory (`ulimit -l` should say unlimited)", error);
  }
  return {{reinterpret_cast<uintptr_t>(memory), registered->rkey, 0}, bytes, registered};
}

void VerbsQp::grant(uint32_t count) {
  slots_.push_back(region(count * sizes_.slot, ibv::kLocalWrite | ibv::kRemoteWrite));
  slots_.back().granted.count = count;
}

uint8_t* VerbsQp::slot(uint32_t number) const {
  for (const Region& one : slots_) {
    if (number < one.granted.count) {
      return reinterpret_cast<uint8_t*>(one.granted.address + number * sizes_.slot);
    }
    number -= one.granted.count;
  }
  return nullptr;
}

VerbsSlots VerbsQp::grow() {
  uint32_t count = 0;
  for (const Region& one : slots_) count += one.granted.count;
  if (2 * count > sizes_.most) return {};
  try {
    grant(count);
  } catch (const std::runtime_error&) {
    return {};  // what there is serves, more slowly
  }
  return slots_.back().granted;
}

VerbsQp::~VerbsQp() { destroy(); }

void VerbsQp::destroy() {
  if (qp_ != nullptr) verbs_.destroy_qp(qp_);
  if (cq_ != nullptr) verbs_.destroy_cq(cq_);
  if (channel_ != nullptr) verbs_.destroy_channel(channel_);
  slots_.push_back(headers_);
  for (const Region& one : slots_) {
    if (one.registered == nullptr) continue;  // `open` had not come so far
    verbs_.dereg_mr(one.registered);
    munmap(reinterpret_cast<void*>(one.granted.address), one.bytes);
  }
}

std::string VerbsQp::card() const {
  Card card{};
  const auto here = offered();
  for (int kind = 0; kind < kKinds; ++kind) {
    if (here[kind] != nullptr) std::memcpy(card.gids[kind], raw(*here[kind]), sizeof(ibv::Gid));
  }
  const VerbsSlots& slots = slots_.front().granted;
  card.address = slots.address;
  card.key = slots.key;
  card.qp = qp_->number;
  card.psn = psn_;
  card.slots = slots.count;
  card.lid = attributes_.lid;
  card.mtu = static_cast<uint8_t>(attributes_.active_mtu);
  return {reinterpret_cast<const char*>(&card), sizeof card};
}

void VerbsQp::connect(const std::string& words) {
  Card card;
  if (words.size() != sizeof card) throw std::runtime_error("this is no card of a queue pair");
  std::memcpy(&card, words.data(), sizeof card);
  if (card.slots == 0 || card.slots > kMostSlots || card.mtu < 1 || card.mtu > 5) {
    throw std::runtime_error("a card with " + std::to_string(card.slots) + " slots and MTU " +
                             std::to_string(card.mtu));
  }
  theirs_ = {card.address, card.key, card.slots};

  ibv::QpAttributes to{};
  to.state = ibv::kReadyToReceive;
  to.path_mtu = std::min<int>(card.mtu, attributes_.active_mtu);
  to.destination_qp = card.qp;
  to.rq_psn = card.psn;
  to.min_rnr_timer = kNotReadyTimer;
  to.address = way(card);
  int error = verbs_.modify_qp(qp_, &to,
                               ibv::kState | ibv::kAddress | ibv::kPathMtu | ibv::kDestinationQp |
                                   ibv::kRqPsn | ibv::kMaxReadsHere | ibv::kMinRnrTimer);
  if (error != 0) refuse(device->name + " finds no way to the other side", error);
  to.state = ibv::kReadyToSend;
  to.timeout = service_.timeout;
  to.retry_count = service_.retries;
  to.rnr_retry = kNotReady;
  to.sq_psn = psn_;
  error = verbs_.modify_qp(qp_, &to,
                           ibv::kState | ibv::kTimeout | ibv::kRetryCount | ibv::kRnrRetry |
                               ibv::kSqPsn | ibv::kMaxReads);
  if (error != 0) refuse(device->name + " cannot send", error);
}

// Where it is not known for which version of RoCE an address is, it is offered for both. InfiniBand has
// no kinds.
std::array<const VerbsPort*, kKinds> VerbsQp::offered() const {
  std::array<const VerbsPort*, kKinds> found{};
  if (attributes_.link_layer != ibv::kEthernet) {
    found[0] = &addresses_.front();
    return found;
  }
  for (const VerbsPort& one : addresses_) {
    const int scope = scope_of(raw(one));
    if (one.version != 1) found[scope] = &one;
    if (one.version != 2) found[kScopes + scope] = &one;
  }
  return found;
}

std::pair<const VerbsPort*, const uint8_t*> VerbsQp::agreed(const Card& card) const {
  const auto here = offered();
  if (attributes_.link_layer != ibv::kEthernet) return {here[0], card.gids[0]};
  Offer mine{}, theirs{};
  for (int kind = 0; kind < kKinds; ++kind) {
    const uint8_t* there = card.gids[kind];
    if (here[kind] != nullptr) mine[kind] = raw(*here[kind]);
    if (!is_zero(there) && scope_of(there) == kind % kScopes) theirs[kind] = there;
  }
  const auto [one, other] = adaptra::agreed(mine, theirs, name());
  return {here[one], theirs[other]};
}

// Within a subnet of InfiniBand the local address is enough; Ethernet has none, routers read the global
// one, and some ports ask for it always.
ibv::Address VerbsQp::way(const Card& card) const {
  ibv::Address to{};
  to.port = static_cast<uint8_t>(port_);
  to.sl = service_.level;
  to.dlid = card.lid;
  const auto [mine, theirs] = agreed(card);
  const bool ethernet = attributes_.link_layer == ibv::kEthernet;
  const bool leaves = !ethernet && !same_subnet(raw(*mine), theirs);
  if (!ethernet && !leaves && !(attributes_.flags & ibv::kGrhRequired)) return to;
  if (leaves && router_of(theirs) != 0) to.dlid = router_of(theirs);
  to.is_global = 1;
  std::memcpy(to.route.dgid.raw, theirs, sizeof(ibv::Gid));
  to.route.sgid_index = static_cast<uint8_t>(mine->gid_index);
  to.route.hop_limit = kHops;
  to.route.traffic_class = service_.traffic_class;
  return to;
}

std::string VerbsQp::name() const {
  return "port " + std::to_string(port_) + " of " + device->name;
}

bool VerbsQp::active() const {
  ibv::PortAttributes attributes{};
  return verbs_.query_port(device->context, port_, &attributes) == 0 &&
         attributes.state == ibv::kPortActive;
}

uint8_t* VerbsQp::headers(uint64_t write) const {
  return reinterpret_cast<uint8_t*>(headers_.granted.address) +
         write % sizes_.writes * sizes_.headers;
}

int VerbsQp::post(ibv::SendWr& wr) {
  ibv::SendWr* bad;
  return qp_->context->ops.post_send(qp_, &wr, &bad);
}

bool VerbsQp::post_receive() {
  ibv::ReceiveWr wr{}, *bad;
  return qp_->context->ops.post_receive(qp_, &wr, &bad) == 0;
}

int VerbsQp::poll(ibv::Completion* found, int most) {
  return cq_->context->ops.poll_cq(cq_, most, found);
}

void VerbsQp::take_event() {
  ibv::Cq* cq;
  void* user;
  if (verbs_.get_cq_event(channel_, &cq, &user) != 0) return;
  verbs_.ack_cq_events(cq_, 1);
  cq_->context->ops.request_notify(cq_, 0);
}

void VerbsQp::stop() {
  ibv::QpAttributes to{};
  to.state = ibv::kError;
  verbs_.modify_qp(qp_, &to, ibv::kState);
}

}  // namespace adaptra
