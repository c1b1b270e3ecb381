#include "memory.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <sys/mman.h>

#include "options.hpp"

namespace fake_cuda {
namespace {

struct Memory {
  std::mutex mutex;
  std::map<char*, Range> device, pinned;
  std::map<int, size_t> used;
};

Memory& memory() {
  static auto* found = new Memory;
  return *found;
}

const Range* find(const std::map<char*, Range>& ranges, const void* p) {
  auto i = ranges.upper_bound((char*)p);
  if (i == ranges.begin()) return nullptr;
  --i;
  return (char*)p < i->first + i->second.bytes ? &i->second : nullptr;
}

size_t page_up(size_t bytes) { return std::max<size_t>(4096, (bytes + 4095) / 4096 * 4096); }

char* map_pages(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? nullptr : (char*)at;
}

}  // namespace

Where where(const void* p, Range* range) {
  Memory& all = memory();
  Lock lock(all.mutex);
  for (auto* ranges : {&all.device, &all.pinned})
    if (const Range* found = find(*ranges, p)) {
      if (range) *range = *found;
      return ranges == &all.device ? Where::device : Where::pinned;
    }
  return Where::pageable;
}

Result allocate(int device, size_t bytes, void** out) {
  Memory& all = memory();
  Lock lock(all.mutex);
  *out = nullptr;
  const size_t size = page_up(bytes);
  if (all.used[device] + size > options().device_bytes) return Result::no_memory;
  char* at = map_pages(size);
  if (!at) return Result::no_memory;
  all.device[at] = {at, size, device};
  all.used[device] += size;
  *out = at;
  return Result::done;
}

Result free_device(void* p) {
  Memory& all = memory();
  Lock lock(all.mutex);
  auto found = all.device.find((char*)p);
  if (found == all.device.end()) return Result::invalid;
  const Range range = found->second;
  lock.unlock();
  wait_device(range.device, "cudaFree, which waits for the device");
  lock.lock();
  if (!all.device.erase((char*)p)) return Result::invalid;
  all.used[range.device] -= range.bytes;
  munmap(p, range.bytes);
  return Result::done;
}

Result allocate_pinned(int device, size_t bytes, void** out) {
  Memory& all = memory();
  Lock lock(all.mutex);
  const size_t size = page_up(bytes);
  char* at = map_pages(size);
  *out = at;
  if (!at) return Result::no_memory;
  all.pinned[at] = {at, size, device};
  return Result::done;
}

Result free_pinned(void* p) {
  Memory& all = memory();
  Lock lock(all.mutex);
  auto found = all.pinned.find((char*)p);
  if (found == all.pinned.end() || found->second.registered) return Result::invalid;
  const Range range = found->second;
  lock.unlock();
  wait_device(range.device, "cudaFreeHost, which waits for the device");
  lock.lock();
  if (!all.pinned.erase((char*)p)) return Result::invalid;
  munmap(p, range.bytes);
  return Result::done;
}

Result pin(int device, void* p, size_t bytes) {
  Memory& all = memory();
  Lock lock(all.mutex);
  if (!p || !bytes) return Result::invalid;
  auto* begin = (char*)p;
  for (char* at : {begin, begin + bytes - 1})
    if (find(all.pinned, at)) return Result::already;
  all.pinned[begin] = {begin, bytes, device, true};
  return Result::done;
}

Result unpin(void* p) {
  Memory& all = memory();
  Lock lock(all.mutex);
  auto found = all.pinned.find((char*)p);
  if (found == all.pinned.end() || !found->second.registered) return Result::not_pinned;
  all.pinned.erase(found);
  return Result::done;
}

void free_and_total(int device, size_t* free, size_t* total) {
  Memory& all = memory();
  Lock lock(all.mutex);
  *total = options().device_bytes;
  *free = *total - all.used[device];
}

void copy_rows(Stream* s, void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
               const char* call) {
  if (!width || !height) return;
  const Where target = where(to), source = where(from);
  const Way way = target != Where::device ? Way::to_host : source != Where::device ? Way::to_device : Way::within;
  const double seconds = way == Way::within ? options().kernel_seconds : (double)(width * height) / options().copy_rate;
  auto rows = [=](const void* base, size_t pitch) {
    for (size_t i = 0; i < height; i++) memmove((char*)to + i * to_pitch, (const char*)base + i * pitch, width);
  };
  if (target == Where::pageable && source == Where::pageable) {
    wait_stream(s, call);
    return rows(from, from_pitch);
  }
  Op op{Kind::copy, "copy", seconds};
  op.way = way;
  if (source == Where::pageable) {
    auto staged = std::make_shared<std::string>(width * height, '\0');
    for (size_t i = 0; i < height; i++) memcpy(&(*staged)[i * width], (const char*)from + i * from_pitch, width);
    op.effect = [=] { rows(staged->data(), width); };
  } else {
    op.effect = [=] { rows(from, from_pitch); };
  }
  launch(s, std::move(op));
  if (target == Where::pageable) wait_stream(s, call);
}

void copy(Stream* s, void* to, const void* from, size_t bytes, const char* call) {
  copy_rows(s, to, bytes, from, bytes, bytes, 1, call);
}

void fill(Stream* s, void* to, int value, size_t bytes) {
  if (bytes) launch(s, {Kind::kernel, "memset", options().kernel_seconds, [=] { memset(to, value, bytes); }});
}

}  // namespace fake_cuda
