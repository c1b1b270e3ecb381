#include "core/wire.h"

namespace adaptra {

std::string fault_of(const Header& h, uint64_t longest_piece) {
  if (h.magic != kMagic) return "no frame begins here";
  if (h.kind < Kind::Data || h.kind > Kind::Slots) {
    return "a frame of kind " + std::to_string(static_cast<int>(h.kind));
  }
  const bool data = h.kind == Kind::Data;
  if (!data && h.kind != Kind::Probe && h.length != 0) return "payload behind a frame that has none";
  if (h.length > longest_piece) return "a piece of " + std::to_string(h.length) + " bytes";
  if (h.total > kLongest) return "a message of " + std::to_string(h.total) + " bytes";
  if (data && (h.offset > h.total || h.length > h.total - h.offset)) {
    return "a piece outside its message";
  }
  if (data && h.length == 0 && h.total != 0) return "a piece of nothing";
  if (h.kind < Kind::Alive && (h.number == 0 || h.before >= h.number)) return "no such message";
  return "";
}

}  // namespace adaptra
