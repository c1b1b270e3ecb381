#include "gpu/pinned.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

namespace adaptra {

namespace {
constexpr uint64_t kPage = 4096;
constexpr uint64_t kSpare = 4;  // a block serves for less, if it is not more than a quarter larger

uint64_t whole_pages(uint64_t bytes) {
  return (std::max<uint64_t>(bytes, 1) + kPage - 1) / kPage * kPage;
}
}  // namespace

Pinned::Pinned(std::shared_ptr<Device> device, std::shared_ptr<Arena> arena, uint64_t limit)
    : device_(std::move(device)), arena_(std::move(arena)), limit_(limit) {}

Pinned::~Pinned() { close(); }

void Pinned::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  trim(true);
}

std::shared_ptr<uint8_t> Pinned::take_idle(uint64_t bytes) {
  bytes = whole_pages(bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  auto known = idle_.lower_bound(bytes);
  if (known == idle_.end() || known->first > bytes + bytes / kSpare) return nullptr;
  // Of equal ones that which came back last: those that nobody needs stay behind for `trim`.
  known = std::prev(idle_.upper_bound(known->first));
  Block block = std::move(known->second);
  idle_.erase(known);
  return lend(std::move(block));
}

std::shared_ptr<uint8_t> Pinned::take(uint64_t bytes) {
  if (auto idle = take_idle(bytes)) return idle;
  bytes = whole_pages(bytes);
  if (this->bytes().held + bytes > limit_) trim(true);
  return lend_new(pin_or_not(bytes));
}

void Pinned::prepare(uint64_t bytes, size_t count) {
  std::vector<std::shared_ptr<uint8_t>> blocks;
  while (blocks.size() < count) {
    blocks.push_back(take(bytes));
    if (!pinned(blocks.back().get())) return;
  }
}

std::string Pinned::reserve(uint64_t bytes, size_t count) {
  bytes = whole_pages(bytes);
  {
    std::lock_guard<std::mutex> lock(mutex_);  // messages are of one size
    const uint64_t lent = bytes_.used / bytes, loose = loose_.size();
    count -= std::min<uint64_t>(count, lent - std::min(lent, loose));
  }
  std::vector<std::shared_ptr<uint8_t>> blocks;
  try {
    while (blocks.size() < count) {
      auto idle = take_idle(bytes);
      blocks.push_back(idle ? std::move(idle) : lend_new(pin_twice(bytes)));
    }
  } catch (const CudaError& error) {
    return error.what();
  }
  return "";
}

std::shared_ptr<uint8_t> Pinned::lend_new(Block block) {
  std::lock_guard<std::mutex> lock(mutex_);
  bytes_.held += block.bytes;
  bytes_.peak = std::max(bytes_.peak, bytes_.held);
  if (bytes_.held > limit_) bytes_.over = std::max(bytes_.over, bytes_.held - limit_);
  return lend(std::move(block));
}

std::shared_ptr<uint8_t> Pinned::lend(Block block) {
  block.recent = true;
  bytes_.used += block.bytes;
  uint8_t* at = block.at;
  if (!block.pinned) loose_.insert(at);
  return {at, [self = shared_from_this(), block = std::move(block)](uint8_t*) {
            self->give_back(block);
          }};
}

void Pinned::give_back(Block block) {
  std::lock_guard<std::mutex> lock(mutex_);
  bytes_.used -= block.bytes;
  const uint64_t size = block.bytes;
  if (!block.pinned) {  // nothing is gained by keeping it
    loose_.erase(block.at);
    bytes_.held -= size;
    return;
  }
  idle_.emplace(size, std::move(block));
  if (!closed_) return;
  device_->slowly([self = weak_from_this()] {
    if (auto pinned = self.lock()) pinned->close();
  });
}

// The first error may be one of a moment, or go with what is idle.
Pinned::Block Pinned::pin_twice(uint64_t bytes) {
  device_->enter();
  try {
    return pin(bytes, false);
  } catch (const CudaError&) {
    trim(true);
  }
  return pin(bytes, true);
}

// An error stays until `trim`. A GPU that has failed as a whole fails its copies, too.
Pinned::Block Pinned::pin_or_not(uint64_t bytes) {
  device_->enter();
  bool refused;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    refused = refused_;
  }
  if (!refused) {
    try {
      return pin_twice(bytes);
    } catch (const CudaError& error) {
      std::lock_guard<std::mutex> lock(mutex_);
      refused_ = true;
      unpinned_ = error.what();
    }
  }
  Block block;
  block.bytes = bytes;
  block.pinned = false;
  block.memory = arena_ ? arena_->take(bytes) : nullptr;
  if (!block.memory) block.memory.reset(new uint8_t[bytes], std::default_delete<uint8_t[]>());
  block.at = block.memory.get();
  return block;
}

Pinned::Block Pinned::pin(uint64_t bytes, bool last) {
  device_->enter();
  const Device::BesideCaptures pins(*device_);  // also on the thread that sends
  Block block;
  block.bytes = bytes;
  if (arena_ && copied().empty()) {
    block.memory = arena_->take(bytes);
    block.at = block.memory.get();
    if (block.at != nullptr) {
      const auto result = device_->cuda.host_register(block.at, bytes, cuda::kHostPortable);
      if (result == cuda::kSuccess) return block;
      if (result != cuda::kOutOfMemory) {
        std::lock_guard<std::mutex> lock(mutex_);
        copied_ = "cuMemHostRegister says " + cuda_words(result);
      } else if (!last) {
        device_->check(result, "cuMemHostRegister");
      }
    }
    block.memory.reset();
  }
  void* at = nullptr;
  device_->check(device_->cuda.host_alloc(&at, bytes, cuda::kHostPortable), "cuMemHostAlloc");
  block.at = static_cast<uint8_t*>(at);
  return block;
}

void Pinned::unpin(Block block) {
  device_->enter();
  const Device::BesideCaptures unpins(*device_);
  if (!block.memory) {
    device_->check(device_->cuda.host_free(block.at), "cuMemFreeHost");
    return;
  }
  device_->check(device_->cuda.host_unregister(block.at), "cuMemHostUnregister");
  arena_->vacate(block.at, block.bytes);
}

void Pinned::trim(bool all) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    refused_ = false;
  }
  if (!all && arena_ && arena_->keeps_pages()) return;
  std::vector<Block> over;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto at = idle_.begin(); at != idle_.end();) {
      if (all || !at->second.recent) {
        bytes_.held -= at->second.bytes;
        over.push_back(std::move(at->second));
        at = idle_.erase(at);
      } else {
        at->second.recent = false;
        ++at;
      }
    }
  }
  for (auto& block : over) {
    try {
      unpin(std::move(block));
    } catch (const CudaError&) {  // the driver has ended or failed, and its pins with it
    }
  }
}

Pinned::Bytes Pinned::bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return bytes_;
}

void Pinned::new_peak() {
  std::lock_guard<std::mutex> lock(mutex_);
  bytes_.peak = bytes_.held;
  bytes_.over = 0;
}

bool Pinned::pinned(const uint8_t* at) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return loose_.count(at) == 0;
}

std::string Pinned::unpinned() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return unpinned_;
}

std::string Pinned::copied() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return copied_;
}

}  // namespace adaptra
