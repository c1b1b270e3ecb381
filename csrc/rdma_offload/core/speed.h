// What a path carries, from when bytes were sent over it and when they were there. The greatest rate
// and the least round trip of the last five to ten seconds are estimated as by BBR (Cardwell et al.,
// "BBR: Congestion-Based Congestion Control", ACM Queue 14-5, 2016), and for the same reason: their
// product is what has to be under way for the path to be full. When a piece will be there is estimated
// from the mean rate while pieces waited.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/work.h"

namespace adaptra {

class Speed {
 public:
  // Of bytes that are sent: when, and how many had arrived by then.
  struct Sent {
    Nanoseconds at;
    uint64_t before;
  };
  Sent send(Nanoseconds at) const { return {at, there_}; }

  // So many of them are known to be there.
  void arrived(const Sent& sent, uint64_t bytes, Nanoseconds at);

  // Bytes that a round trip has carried, at most; 0 while unknown.
  uint64_t trip() const {
    return rates_.best() > 0 ? static_cast<uint64_t>(rates_.best() * round_trip()) : 0;
  }

  // In how many nanoseconds from `time` on the last of `bytes` would be there; 0 while unknown. A rate
  // counts for twice as much every ten seconds in which no piece waited: the path may carry more by now,
  // and one that is not used because it was slow would stay so for ever.
  Nanoseconds due(uint64_t bytes, Nanoseconds time) const;

 private:
  // The greatest of what came lately.
  class Greatest {
   public:
    void add(double value, Nanoseconds at);
    double best() const { return std::max(now_, before_); }

   private:
    double now_ = 0, before_ = 0;
    Nanoseconds since_ = 0;
  };
  double round_trip() const { return 1 / trips_.best(); }

  uint64_t there_ = 0;       // bytes
  Greatest rates_, trips_;   // bytes, and round trips, per nanosecond
  double rate_ = 0;          // of pieces that waited, their mean;
  Nanoseconds filled_ = 0;   // and when the last one did
};

}  // namespace adaptra
