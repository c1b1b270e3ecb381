// What a peer may say, and what none should: frames that fit together, changed in many ways.
#pragma once

#include <algorithm>
#include <array>
#include <random>
#include <vector>

#include "core/wire.h"

// Speaks for a side that keeps to the protocol, but for `percent` of its frames.
class Speaker {
 public:
  static constexpr int kTags = 4;

  Speaker(uint64_t seed, uint64_t piece, uint64_t window)
      : random_(seed), piece_(piece), window_(window) {}

  uint64_t below(uint64_t most) { return random_() % most; }
  bool chance(int percent) { return below(100) < static_cast<uint64_t>(percent); }

  adaptra::Header next(int percent) {
    adaptra::Header header = !old_.empty() && chance(2) ? old_[below(old_.size())] : honest();
    if (chance(percent)) damage(header);
    if (old_.size() < 64) old_.push_back(header);
    old_[below(old_.size())] = header;
    return header;
  }

  // What the other side has sent.
  void take(const adaptra::Header& header) {
    returned_ = std::max(returned_, header.taken);
    if (header.kind == Kind::Data) received_ = std::max(received_, header.number);
    if (header.kind == Kind::Have) {
      messages_.erase(std::remove_if(messages_.begin(), messages_.end(),
                                     [&](auto& one) {
                                       return one.about.number - header.number < header.total;
                                     }),
                      messages_.end());
    }
  }

  // What it has sent may be lost.
  void again() {
    for (auto& message : messages_) message.next = 0;
  }

 private:
  using Kind = adaptra::Kind;
  struct Message {
    adaptra::Header about;
    uint64_t next = 0;
  };

  adaptra::Header honest() {
    adaptra::Header header;
    header.taken = taken_;
    const uint64_t what = below(100);
    if (what < 4) return header;
    if (what < 5) {
      header.kind = Kind::Lost;
      return header;
    }
    if (what < 7) {
      header.kind = chance(50) ? Kind::Probe : Kind::Probed;
      header.number = 1 + below(3);
      if (header.kind == Kind::Probe) header.length = below(std::min(piece_, adaptra::kProbe) + 1);
      return header;
    }
    if (what < 15 && received_ > 0) {
      header.kind = chance(50) ? Kind::Grant : Kind::Have;
      header.number = 1 + below(received_);
      if (header.kind == Kind::Have) header.total = 1 + below(3);
      return header;
    }
    if (messages_.size() < 8 && chance(30)) begin();
    if (messages_.empty()) return header;
    Message& message = messages_[below(messages_.size())];
    header = message.about;
    header.taken = taken_;
    if (what < 22 || (message.next == header.total && header.total > 0)) {
      header.kind = Kind::Ask;
      return header;
    }
    header.kind = Kind::Data;
    header.flags = adaptra::kEager;
    header.offset = message.next;
    header.length = std::min(header.total - message.next, 1 + below(chance(90) ? 100 : piece_));
    message.next += header.length;
    return header;
  }

  void begin() {
    Message message;
    message.about.number = ++last_;
    message.about.tag = below(kTags);
    message.about.before = chance(80) ? 0 : last_of_[message.about.tag];
    message.about.total = chance(20) ? 0 : below(chance(90) ? 200 : 3 * piece_);
    if (spent_ - returned_ + adaptra::cost(message.about.total) > window_) {
      --last_;
      return;
    }
    spent_ += adaptra::cost(message.about.total);
    last_of_[message.about.tag] = last_;
    messages_.push_back(message);
  }

  // A value where nobody expects it: near a limit, or near what it was.
  uint64_t odd(uint64_t was) {
    switch (below(6)) {
      case 0: return random_();
      case 1: return random_() >> below(64);
      case 2: return (uint64_t{1} << below(64)) - below(2);
      case 3: return was + below(5) - 2;
      case 4: return -below(300);
      default: return below(3);
    }
  }

  void damage(adaptra::Header& header) {
    switch (below(11)) {
      case 0: header.magic = odd(header.magic); break;
      case 1: header.kind = static_cast<Kind>(chance(80) ? 1 + below(9) : odd(0)); break;
      case 2: header.length = odd(header.length); break;
      case 3: header.number = chance(50) ? 1 + below(last_ + 1) : odd(header.number); break;
      case 4: header.before = odd(header.before); break;
      case 5: header.total = odd(header.total); break;
      case 6: header.offset = odd(header.offset); break;
      case 7: header.tag = chance(50) ? below(kTags) : odd(header.tag); break;
      case 8: header.taken = odd(taken_); break;
      case 9: header.flags = below(5); break;
      default: {
        auto* bytes = reinterpret_cast<uint8_t*>(&header);
        bytes[below(sizeof header)] ^= 1 << below(8);
      }
    }
  }

  std::mt19937_64 random_;
  const uint64_t piece_, window_;
  uint64_t last_ = 0, taken_ = 0, spent_ = 0, returned_ = 0, received_ = 0;
  std::array<uint64_t, kTags> last_of_{};
  std::vector<Message> messages_;
  std::vector<adaptra::Header> old_;  // that may come again
};
