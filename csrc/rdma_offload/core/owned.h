// A descriptor that is closed when nobody has it any more.
#pragma once

#include <unistd.h>

#include <utility>

namespace adaptra {

class Owned {
 public:
  Owned(int fd = -1) : fd_(fd) {}
  Owned(Owned&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Owned() {
    if (fd_ >= 0) ::close(fd_);
  }
  operator int() const { return fd_; }

 private:
  int fd_;
};

}  // namespace adaptra
