// Memory for messages: reused, and visible to other processes of this machine through one descriptor.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace adaptra {

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  // Reserves addresses; memory is taken when it is used. `most`: bytes at one time.
  static std::shared_ptr<Arena> make(uint64_t most);
  ~Arena();

  // At least `bytes`, given back when nobody holds it; nullptr when there are not so many left.
  std::shared_ptr<uint8_t> take(uint64_t bytes);

  // Give the pages of memory that was taken back to the system; false where a device may read them
  // for as long as it is open.
  bool vacate(uint8_t* at, uint64_t bytes);
  void keep_pages();
  bool keeps_pages();

  // Take pages from the NUMA node `node` while it has some: those that nobody has used yet. Why the
  // system refuses, or an empty string: then memory comes from anywhere, as before.
  std::string prefer_node(int node);

  bool holds(const uint8_t* at) const { return base_ <= at && at < base_ + most_; }
  uint64_t offset(const uint8_t* at) const { return at - base_; }
  int fd() const { return fd_; }
  uint64_t size() const { return most_; }

 private:
  Arena(int fd, uint8_t* base, uint64_t most) : fd_(fd), base_(base), most_(most) {}
  void give_back(uint8_t* at, uint64_t bytes);  // on any thread, for reuse

  const int fd_;
  uint8_t* const base_;
  const uint64_t most_;
  std::mutex mutex_;
  bool keeps_pages_ = false;
  uint64_t used_ = 0;                                // from here on nothing was ever taken
  std::map<uint64_t, std::vector<uint8_t*>> free_;   // by size
};

// Bytes of memory that another process has made. Throws for one that can shrink, or whose pages are
// not there for certain (huge ones): to read what is gone would kill this process.
uint64_t sealed(int fd);

// Another process's arena, for reading.
class View {
 public:
  // Throws as `sealed` does.
  explicit View(int fd);
  ~View();
  const uint8_t* at(uint64_t offset, uint64_t bytes) const {
    return offset <= size_ && bytes <= size_ - offset ? base_ + offset : nullptr;
  }

 private:
  const uint8_t* base_;
  uint64_t size_;
};

}  // namespace adaptra
