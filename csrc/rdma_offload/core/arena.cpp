#include "core/arena.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <system_error>

namespace adaptra {

namespace {

constexpr uint64_t kLeast = 4096;

// Sizes grow by an eighth to a quarter, so that few are wasted and many are reused.
uint64_t rounded(uint64_t bytes) {
  uint64_t size = kLeast;
  while (size < bytes) {
    uint64_t power = kLeast;
    while (power * 2 <= size) power *= 2;
    const uint64_t step = power / 4 < kLeast ? kLeast : power / 4;
    size += step;
  }
  return size;
}

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

std::shared_ptr<Arena> Arena::make(uint64_t most) {
  most = (most + kLeast - 1) / kLeast * kLeast;
  const int fd = memfd_create("adaptra", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail("memfd_create");
  if (ftruncate(fd, most) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    ::close(fd);
    fail("a memory of its own");
  }
  void* base = mmap(nullptr, most, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    ::close(fd);
    fail("mmap");
  }
  madvise(base, most, MADV_DONTFORK);  // a child that wrote there would change our messages
  return std::shared_ptr<Arena>(new Arena(fd, static_cast<uint8_t*>(base), most));
}

Arena::~Arena() {
  munmap(base_, most_);
  ::close(fd_);
}

std::string Arena::prefer_node(int node) {
  constexpr int kNodes = 1024, kBits = CHAR_BIT * sizeof(unsigned long);
  unsigned long nodes[kNodes / kBits] = {};
  if (node < 0 || node >= kNodes) return "there is no such NUMA node";
  nodes[node / kBits] = 1ul << node % kBits;
  // By number: the library that has a function for it need not be installed. The kernel wants one bit
  // more than there are. The policy is the memory's own, and so holds for every user of a page.
  if (syscall(SYS_mbind, base_, most_, MPOL_PREFERRED, nodes, kNodes + 1ul, 0u) == 0) return "";
  return std::string("mbind: ") + std::generic_category().message(errno);
}

std::shared_ptr<uint8_t> Arena::take(uint64_t bytes) {
  const uint64_t size = rounded(bytes);
  uint8_t* at = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto known = free_.find(size);
    if (known != free_.end() && !known->second.empty()) {
      at = known->second.back();
      known->second.pop_back();
    } else if (size <= most_ - used_) {
      at = base_ + used_;
      used_ += size;
    }
  }
  if (at == nullptr) return nullptr;
  return {at, [self = shared_from_this(), size](uint8_t* at) { self->give_back(at, size); }};
}

void Arena::give_back(uint8_t* at, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_[bytes].push_back(at);
}

bool Arena::vacate(uint8_t* at, uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);  // until the pages have gone no device learns of them
  if (keeps_pages_) return false;
  const int what = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  return fallocate(fd_, what, offset(at), bytes / kLeast * kLeast) == 0;
}

void Arena::keep_pages() {
  std::lock_guard<std::mutex> lock(mutex_);
  keeps_pages_ = true;
}

bool Arena::keeps_pages() {
  std::lock_guard<std::mutex> lock(mutex_);
  return keeps_pages_;
}

uint64_t sealed(int fd) {
  struct stat about{};
  struct statfs kind{};
  const int seals = fcntl(fd, F_GET_SEALS);
  if (fstat(fd, &about) != 0 || fstatfs(fd, &kind) != 0 || seals < 0) {
    fail("the other side's memory");
  }
  if (!(seals & F_SEAL_SHRINK) || kind.f_type != TMPFS_MAGIC) {
    errno = EINVAL;
    fail("the other side's memory may go");
  }
  return about.st_size;
}

View::View(int fd) : size_(sealed(fd)) {
  void* base = mmap(nullptr, size_, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) fail("mmap");
  base_ = static_cast<const uint8_t*>(base);
}

View::~View() { munmap(const_cast<uint8_t*>(base_), size_); }

}  // namespace adaptra
