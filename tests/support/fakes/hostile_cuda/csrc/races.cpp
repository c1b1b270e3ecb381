// Accesses that nothing orders: each access of a block against those before it, by clocks.
#include <algorithm>

#include "memory.h"

namespace hostile {

namespace {

std::string verb(bool writes) { return writes ? "writes" : "reads"; }

bool overlap(const Access& one, uintptr_t from, uintptr_t to) { return one.from < to && from < one.to; }

}  // namespace

void touch(const Op& op, const Touch& touched) {
  if (touched.bytes == 0) return;
  Block* block = block_of(touched.at, touched.bytes);
  if (block == nullptr) {
    finding("memory: " + in_words(op) + " " + verb(touched.writes) + " memory that is neither the "
            "device's nor pinned: CUDA would stage it and block the host");
    return;
  }
  if (!block->live) {
    finding("freed: " + in_words(op) + " " + verb(touched.writes) + " " + block->label +
            ", which was given back before");
    return;
  }
  if (block->place == Place::device && block->device != op.stream->device) {
    finding("memory: " + in_words(op) + " " + verb(touched.writes) + " memory of another device");
  }
  const uintptr_t from = reinterpret_cast<uintptr_t>(touched.at), to = from + touched.bytes;
  for (auto& other : block->accesses) {
    if (!overlap(other, from, to) || !(other.writes || touched.writes)) continue;
    if (other.stream == op.stream->number || before(other.stream, other.number, op.clock)) continue;
    finding("race: " + in_words(op) + " " + verb(touched.writes) + " " + block->label + ", which " +
            other.what + " " + verb(other.writes) + ": no event orders them");
  }
  auto& all = block->accesses;
  all.erase(std::remove_if(all.begin(), all.end(),
                           [&](const Access& old) {
                             return from <= old.from && old.to <= to &&
                                    (touched.writes || !old.writes) &&
                                    before(old.stream, old.number, op.clock);
                           }),
            all.end());
  all.push_back({from, to, touched.writes, op.stream->number, op.number, in_words(op)});
}

void host_frees(Block& block, const char* call) {
  for (auto& access : block.accesses) {
    if (before(access.stream, access.number, block.device->host)) continue;
    finding(std::string("race: ") + call + " gives " + block.label + " back, which " + access.what +
            " " + verb(access.writes) + ": the host has not seen that end");
  }
}

}  // namespace hostile
