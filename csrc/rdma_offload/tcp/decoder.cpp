#include "tcp/decoder.h"

#include <algorithm>

namespace adaptra {

Decoder::Decoder(uint64_t longest_piece) : longest_piece_(longest_piece), buffer_(kBuffer) {}

ssize_t Decoder::read(Path& path, Sink& sink, const Read& read) {
  ssize_t got;
  const uint64_t left = in_frame_ ? header_.length - done_ : 0;
  if (left >= kBuffer) {  // straight to its place
    got = sink.fill(header_, done_, [&](uint8_t* to) {
      return to == nullptr ? read(buffer_.data(), kBuffer) : read(to, left);
    });
    if (got > 0) done_ += got;
  } else {
    got = read(buffer_.data() + end_, kBuffer - end_);
    if (got > 0) end_ += got;
  }
  if (got > 0) use(path, sink);
  return got;
}

void Decoder::use(Path& path, Sink& sink) {
  for (;;) {
    if (!in_frame_) {
      if (end_ - begin_ < sizeof(Header)) break;
      std::memcpy(&header_, buffer_.data() + begin_, sizeof(Header));
      begin_ += sizeof(Header);
      fault_ = fault_of(header_, longest_piece_);
      if (!fault_.empty()) return;
      in_frame_ = true;
      done_ = 0;
    }
    const uint64_t part = std::min<uint64_t>(header_.length - done_, end_ - begin_);
    if (part > 0) {
      sink.fill(header_, done_, [&](uint8_t* to) -> ssize_t {
        if (to != nullptr) std::memcpy(to, buffer_.data() + begin_, part);
        return part;
      });
      begin_ += part;
      done_ += part;
    }
    if (done_ < header_.length) break;
    in_frame_ = false;
    if (!sink.arrived(path, header_)) {
      fault_ = "a frame against the protocol";
      return;
    }
  }
  // What is left of a header moves to the front; a payload has been used up.
  std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
  end_ -= begin_;
  begin_ = 0;
}

}  // namespace adaptra
