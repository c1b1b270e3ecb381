// The devices' heaps, mapped twice: where pointers lead nobody may look, which a signal enforces.
#include "memory.h"

#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>

namespace hostile {

namespace {

constexpr size_t kHeap = 1ull << 30;  // addresses of one device; memory is taken when it is used
constexpr size_t kAlign = 512;        // as cudaMalloc

struct Heap {
  uint8_t *seen, *own;  // what pointers say, and where the bytes are
  size_t used = 0;
  std::map<std::pair<Stream*, size_t>, std::vector<uintptr_t>> free;  // the last one goes first
};

std::vector<Heap> heaps;
std::map<uintptr_t, Block> blocks;
struct sigaction before_us;

// The host has touched device memory, or something else is wrong, which is not ours to say.
void on_fault(int number, siginfo_t* info, void*) {
  const auto at = static_cast<uint8_t*>(info->si_addr);
  for (size_t i = 0; i < heaps.size(); ++i) {
    if (at < heaps[i].seen || at >= heaps[i].seen + kHeap) continue;
    char text[160];
    const int length = snprintf(text, sizeof text,
                                "hostile: the host touches memory of device %zu, at %p\n", i,
                                static_cast<void*>(at));
    if (write(2, text, length) < 0) {}
    _exit(86);
  }
  sigaction(number, &before_us, nullptr);
  raise(number);
}

uint8_t* map(int fd, int protection) {
  void* at = mmap(nullptr, kHeap, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (at == MAP_FAILED) throw std::runtime_error("hostile: no memory for a device");
  return static_cast<uint8_t*>(at);
}

Block& add(uintptr_t at, size_t bytes, Place place, Device& device, const std::string& label) {
  Block& made = blocks[at];
  made = {};
  made.at = at;
  made.bytes = bytes;
  made.place = place;
  made.device = &device;
  made.label = label;
  return made;
}

template <typename T>
void words(const void* at, size_t bytes, T each) {  // whole ones, by eight bytes
  uint8_t* from = reach(at);
  for (size_t i = 0; i + 8 <= bytes; i += 8) each(from + i);
}

std::pair<uintptr_t, uintptr_t> range(const void* at, size_t bytes) {
  return {reinterpret_cast<uintptr_t>(at), reinterpret_cast<uintptr_t>(at) + bytes};
}

bool in_use(const Block& block, const void* at, size_t bytes) {
  const auto [from, to] = range(at, bytes);
  for (auto& [begin, end] : block.copied) if (begin < to && from < end) return true;
  return false;
}

void no_more(Block& block, const void* at, size_t bytes) {
  const auto found = std::find(block.copied.begin(), block.copied.end(), range(at, bytes));
  if (found != block.copied.end()) block.copied.erase(found);
}

}  // namespace

void open_heaps(int devices) {
  close_heaps();
  for (int i = 0; i < devices; ++i) {
    const int fd = memfd_create("hostile", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, kHeap) != 0) throw std::runtime_error("hostile: no memory");
    heaps.push_back({map(fd, PROT_NONE), map(fd, PROT_READ | PROT_WRITE), 0, {}});
    close(fd);
  }
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  struct sigaction old {};
  sigaction(SIGSEGV, &action, &old);
  if (old.sa_sigaction != on_fault) before_us = old;
}

void close_heaps() {
  for (auto& heap : heaps) {
    munmap(heap.seen, kHeap);
    munmap(heap.own, kHeap);
  }
  for (auto& [at, block] : blocks) {
    if (block.place == Place::pinned && block.live) munmap(reinterpret_cast<void*>(at), block.bytes);
  }
  heaps.clear();
  blocks.clear();
}

Block* block_of(const void* at, size_t bytes) {
  const auto from = reinterpret_cast<uintptr_t>(at);
  auto found = blocks.upper_bound(from);
  if (found == blocks.begin()) return nullptr;
  Block& block = (--found)->second;
  return from + bytes <= block.at + block.bytes ? &block : nullptr;
}

uint8_t* reach(const void* at) {
  const auto seen = const_cast<uint8_t*>(static_cast<const uint8_t*>(at));
  for (auto& heap : heaps) {
    if (seen >= heap.seen && seen < heap.seen + kHeap) return heap.own + (seen - heap.seen);
  }
  return seen;
}

Block& allocate(Device& device, Stream& stream, size_t bytes, const std::string& label) {
  Heap& heap = heaps[device.ordinal];
  bytes = std::max<size_t>(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
  auto& same = heap.free[{&stream, bytes}];
  if (!same.empty()) {
    Block& block = blocks.at(same.back());
    same.pop_back();
    block.live = true;
    block.label = label;
    return block;
  }
  if (heap.used + bytes > kHeap) throw std::runtime_error("hostile: the device's memory is full");
  const auto at = reinterpret_cast<uintptr_t>(heap.seen + heap.used);
  heap.used += bytes;
  Block& block = add(at, bytes, Place::device, device, label);
  block.stream = &stream;
  fill(heap.seen + (at - reinterpret_cast<uintptr_t>(heap.seen)), bytes, Poison::fresh);
  return block;
}

void give_back(Block& block, const std::string& who) {
  const auto at = reinterpret_cast<void*>(block.at);
  const size_t bytes = block.bytes;
  Op op;
  op.kind = Op::Kind::kernel;
  op.what = "the next use of \"" + block.label + "\", which " + who + " freed,";
  op.ends = [at, bytes] { fill(at, bytes, Poison::freed); };
  issue(*block.stream, std::move(op), {{at, bytes, true}});
  block.live = false;
  heaps[block.device->ordinal].free[{block.stream, bytes}].push_back(block.at);
}

void* pin(Device& device, size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  add(reinterpret_cast<uintptr_t>(at), bytes, Place::pinned, device,
      "a pinned buffer of " + std::to_string(bytes) + " bytes");
  fill(at, bytes, Poison::fresh);
  return at;
}

bool add_registered(Device& device, void* at, size_t bytes) {
  if (block_of(at, 1) != nullptr) return false;
  add(reinterpret_cast<uintptr_t>(at), bytes, Place::registered, device,
      "registered memory of " + std::to_string(bytes) + " bytes");
  return true;
}

bool unpin(void* at, Place place, const char* call) {
  const auto found = blocks.find(reinterpret_cast<uintptr_t>(at));
  if (found == blocks.end() || found->second.place != place) return false;
  host_frees(found->second, call);
  if (!found->second.copied.empty()) {  // it would be written to later: the memory stays
    finding("freed: " + std::string(call) + " of " + found->second.label +
            " while copies to or from it are outstanding");
    found->second.live = false;
    return true;
  }
  if (place == Place::pinned) munmap(at, found->second.bytes);
  blocks.erase(found);
  return true;
}

std::string pinned_left(int device) {
  size_t count = 0, bytes = 0;
  for (auto& [_, block] : blocks) {
    if (block.place == Place::device || block.device->ordinal != device || !block.live) continue;
    ++count;
    bytes += block.bytes;
  }
  if (count == 0) return "";
  return std::to_string(count) + " pinned or registered buffers of " + std::to_string(bytes) + " bytes";
}

void fill(const void* at, size_t bytes, Poison poison) {
  words(at, bytes, [&](uint8_t* word) { memcpy(word, &poison, 8); });
}

std::string poison_in(const void* at, size_t bytes) {
  const char* found = nullptr;
  words(at, bytes, [&](const uint8_t* word) {
    uint64_t value;
    memcpy(&value, word, 8);
    if (value == static_cast<uint64_t>(Poison::fresh)) found = "memory that nobody has written";
    if (value == static_cast<uint64_t>(Poison::freed)) found = "memory that was freed";
    if (value == static_cast<uint64_t>(Poison::running)) found = "an output before its operation was over";
    if (value == static_cast<uint64_t>(Poison::pinned)) found = "pinned memory that a copy had not reached";
  });
  return found == nullptr ? "" : found;
}

uint64_t digest(const void* at, size_t bytes) {
  uint64_t sum = bytes;
  const uint8_t* from = reach(at);
  for (size_t i = 0; i < bytes; ++i) sum = (sum ^ from[i]) * 0x100000001b3;
  return sum;
}

Op copy_op(Device&, void* to, const void* from, size_t bytes) {
  Block *target = block_of(to, bytes), *source = block_of(from, bytes);
  const auto on_host = [](Block* block) { return block != nullptr && block->place != Place::device; };
  const bool out = on_host(target), in = on_host(source);
  Op op;
  op.kind = Op::Kind::copy;
  const std::string size = std::to_string(bytes) + " bytes";
  op.what = (out ? "a copy of " + size + " of " + (source != nullptr ? source->label : "?") + " to the host"
                 : in ? "a copy of " + size + " to the device's " + (target != nullptr ? target->label : "?")
                      : "a copy of " + size);
  // What the host does to pinned memory meanwhile shows, where no other copy uses it, too.
  const bool alone_out = out && !in_use(*target, to, bytes), alone_in = in && !in_use(*source, from, bytes);
  if (alone_out) fill(to, bytes, Poison::pinned);
  const uint64_t was = alone_in ? digest(from, bytes) : 0, poison = alone_out ? digest(to, bytes) : 0;
  if (out) target->copied.push_back(range(to, bytes));
  if (in) source->copied.push_back(range(from, bytes));
  const std::string what = op.what;
  op.begins = [=] {
    if (!out && target != nullptr) fill(to, bytes, Poison::running);
  };
  op.ends = [=] {
    if (out) no_more(*target, to, bytes);
    if (in) no_more(*source, from, bytes);
    if (alone_in && digest(from, bytes) != was) {
      finding("pinned: the host wrote into the source of " + what + " before that was over");
    }
    if (alone_out && !in_use(*target, to, bytes) && digest(to, bytes) != poison) {
      finding("pinned: the host wrote into the target of " + what + " before that was over");
    }
    const std::string bad = poison_in(from, bytes);
    if (!bad.empty()) finding("poison: " + what + " reads " + bad);
    memmove(reach(to), reach(from), bytes);
  };
  return op;
}

}  // namespace hostile
