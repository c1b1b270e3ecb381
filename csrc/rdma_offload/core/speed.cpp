#include "core/speed.h"

#include <cmath>

namespace adaptra {

namespace {
constexpr Nanoseconds kSpan = 5000000000;  // of what is forgotten together
constexpr double kTwice = 1e10;             // nanoseconds
constexpr double kMean = 16;                // of so many pieces, about
constexpr uint64_t kEnough = 1 << 20;       // bytes under way that fill a path, if any do
}

void Speed::Greatest::add(double value, Nanoseconds at) {
  if (since_ == 0 || at - since_ > 2 * kSpan) {
    before_ = now_ = 0;
    since_ = at;
  } else if (at - since_ > kSpan) {
    before_ = now_;
    now_ = 0;
    since_ = at;
  }
  now_ = std::max(now_, value);
}

void Speed::arrived(const Sent& sent, uint64_t bytes, Nanoseconds at) {
  there_ += bytes;
  const auto took = static_cast<double>(std::max<Nanoseconds>(at - sent.at, 1));
  const uint64_t moved = there_ - sent.before;
  trips_.add(1 / took, at);
  const double rate = static_cast<double>(moved) / took;
  rates_.add(rate, at);
  if (moved < kEnough || took < 2 * round_trip()) return;  // the rate of the sender: it may carry more
  rate_ += filled_ == 0 ? rate : (rate - rate_) / kMean;
  filled_ = at;
}

Nanoseconds Speed::due(uint64_t bytes, Nanoseconds time) const {
  if (filled_ == 0) return 0;
  const double rate = rate_ * std::exp2(static_cast<double>(time - filled_) / kTwice);
  return static_cast<Nanoseconds>(round_trip() / 2 + static_cast<double>(bytes) / rate);
}

}  // namespace adaptra
