// Frames out of a stream of bytes.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/path.h"

namespace adaptra {

class Decoder {
 public:
  // As ::recv: where to, how many bytes at most; how many came.
  using Read = std::function<ssize_t(uint8_t*, size_t)>;

  explicit Decoder(uint64_t longest_piece);

  // Read once, and hand on what came: payloads go to their place, frames follow when they are whole.
  // What `read` returned.
  ssize_t read(Path& path, Sink& sink, const Read& read);

  // What ended the stream, or empty: nothing may be read after it.
  const std::string& fault() const { return fault_; }

  static constexpr size_t kBuffer = 16 << 10;  // bytes; small frames are read together

 private:
  void use(Path& path, Sink& sink);  // hand on what is in the buffer; keeps part of a header

  const uint64_t longest_piece_;
  std::vector<uint8_t> buffer_;
  size_t begin_ = 0, end_ = 0;  // of what has been read and not used
  Header header_;
  bool in_frame_ = false;
  uint64_t done_ = 0;  // bytes of the frame's payload
  std::string fault_;
};

}  // namespace adaptra
