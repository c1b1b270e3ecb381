// What travels between two ranks: frames, of which messages are made. See docs/wire-protocol.md.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

namespace adaptra {

enum class Kind : uint8_t {
  Data = 1,  // a piece of a message
  Ask,       // may this message come? also: has it come?
  Grant,     // a receive is posted for it
  Have,      // all of it is here, and of those behind it, `total` messages together
  Alive,     // nothing but what every frame says
  Bye,       // the sender closes
  Lost,      // a path has failed at the sender's side: words that it took may be lost
  Probe,     // nothing, but as large as a piece: does this path carry it?
  Probed,    // it does; over the same path
  Slots,     // of a path over RDMA: more memory to write to
};

using Tag = uint64_t;

constexpr uint16_t kMagic = 0xada1;
constexpr uint64_t kLongest = 1ull << 40;  // bytes of a message

// Little endian, 64 bytes.
struct Header {
  uint16_t magic = kMagic;
  Kind kind = Kind::Alive;
  uint8_t flags = 0;      // Data, Ask: of the message, as below
  uint32_t length = 0;    // bytes of payload that follow
  uint64_t number = 0;    // of the message, counted by its sender from 1
  uint64_t before = 0;    // the last message of this tag that had not arrived when this was sent
  uint64_t total = 0;     // bytes of the message
  uint64_t offset = 0;    // of this piece
  Tag tag = 0;
  uint64_t sent = 0;      // nanoseconds on the sender's monotonic clock
  uint64_t taken = 0;     // credit that this side has given back, ever
};
static_assert(sizeof(Header) == 64, "the wire's layout");

constexpr uint8_t kEager = 1;  // it is sent on credit, which `taken` gives back
constexpr uint8_t kSoon = 2;   // its sender waits for `have`

// After so many bytes messages are acknowledged at once, because their sender keeps them until then.
constexpr uint64_t kHaveBytes = 1 << 20;

// What a message takes of the credit: its bytes, and what it costs to know of it.
constexpr uint64_t kCost = 256;
inline uint64_t cost(uint64_t total) { return total + kCost; }

// Messages that a side may have under way: sent, and not known to be there.
constexpr uint64_t kMost = 1 << 16;

// Of a message there may be so many separate stretches, and one more for so many of its bytes.
constexpr uint64_t kStretches = 64, kStretch = 4096;

constexpr uint64_t kProbe = 64 << 10;  // bytes of a probe, at most

// Why a header cannot be, or empty.
std::string fault_of(const Header& header, uint64_t longest_piece);

}  // namespace adaptra
