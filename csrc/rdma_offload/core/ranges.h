// A set of whole numbers as ranges [begin, end): which bytes, or which messages, are here.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <utility>

namespace adaptra {

class Ranges {
 public:
  // Whether all of [begin, end) is in it; true for an empty range.
  bool holds(uint64_t begin, uint64_t end) const {
    if (begin >= end) return true;
    auto after = ranges_.upper_bound(begin);
    return after != ranges_.begin() && std::prev(after)->second >= end;
  }

  // Add [begin, end); the count of what is new.
  uint64_t add(uint64_t begin, uint64_t end) {
    if (begin >= end) return 0;
    uint64_t known = 0;
    auto at = ranges_.upper_bound(begin);
    if (at != ranges_.begin() && std::prev(at)->second >= begin) --at;
    const uint64_t from = begin, to = end;
    while (at != ranges_.end() && at->first <= end) {
      const uint64_t low = at->first > from ? at->first : from;
      const uint64_t high = at->second < to ? at->second : to;
      if (high > low) known += high - low;
      if (at->first < begin) begin = at->first;
      if (at->second > end) end = at->second;
      at = ranges_.erase(at);
    }
    ranges_[begin] = end;
    return to - from - known;
  }

  // The first range, which is in it no more; there is one.
  std::pair<uint64_t, uint64_t> pop() {
    const std::pair<uint64_t, uint64_t> first = *ranges_.begin();
    ranges_.erase(ranges_.begin());
    return first;
  }

  // How far it reaches from 0 on without a gap.
  uint64_t prefix() const {
    return ranges_.empty() || ranges_.begin()->first > 0 ? 0 : ranges_.begin()->second;
  }

  size_t pieces() const { return ranges_.size(); }

 private:
  std::map<uint64_t, uint64_t> ranges_;
};

}  // namespace adaptra
