// Collectives as rings of messages, so that a slow link slows each of them by the messages that cross it.
#include <cstring>

#include "nccl_communicator.hpp"

namespace fake_cuda {
namespace {

struct Ring {
  Wire& wire;
  const Item& item;
  size_t n = (size_t)wire.size, rank = (size_t)wire.rank, unit = width(item.type);
  uint32_t kind = (uint32_t)item.call;

  size_t chunk(size_t i) const { return i % n; }
  int next() const { return (int)((rank + 1) % n); }
  int previous() const { return (int)((rank + n - 1) % n); }

  bool send_on(char* out, size_t bytes) { return wire.exchange({{next(), out, bytes, kind}}, {}); }
  bool receive(char* in, size_t bytes) { return wire.exchange({}, {{previous(), in, bytes, kind}}); }

  // Chunks of `values` go round, each rank passing on what it got last. Those of the first `adding` steps are added to
  // the rank's own, those of the others replace them. All receives stand posted from the start, so a slow link delays a
  // chunk each time that it crosses, and not each step.
  template <class Begin, class Between>
  bool go_round(char* values, Begin begin, size_t first, size_t adding, size_t steps, Between between) {
    auto at = [&](size_t i) { return values + begin(i) * unit; };
    auto count = [&](size_t i) { return begin(i + 1) - begin(i); };
    auto out = [&](size_t step) { return chunk(first + 2 * n - step); };
    std::vector<std::vector<char>> come(adding);
    std::vector<Message> receives;
    for (size_t step = 0; step < steps; step++) {
      const size_t in = out(step + 1);
      if (step < adding) come[step].resize(count(in) * unit);
      receives.push_back({previous(), step < adding ? come[step].data() : at(in), count(in) * unit, kind});
    }
    auto message = [&](size_t step) { return Message{next(), at(out(step)), count(out(step)) * unit, kind}; };
    return wire.exchange({message(0)}, std::move(receives), [&](size_t step) -> std::vector<Message> {
      const size_t in = out(step + 1);
      if (step < adding) reduce_into(at(in), come[step].data(), count(in), item.type, item.reduction);
      if (step + 1 == adding) between(at(in), count(in));
      return step + 1 < steps ? std::vector<Message>{message(step + 1)} : std::vector<Message>{};
    });
  }

  double last_factor() const { return item.reduction.op == ncclAvg ? 1.0 / (double)n : 1.0; }

  bool all_reduce() {
    auto* values = (char*)item.out;
    if (item.in != item.out) memmove(values, item.in, item.count * unit);
    scale(values, item.count, item.type, item.reduction.factor);
    auto begin = [&](size_t i) { return item.count * i / n; };
    auto total = [&](char* at, size_t count) { scale(at, count, item.type, last_factor()); };
    return n == 1 || go_round(values, begin, rank, n - 1, 2 * (n - 1), total);
  }

  bool reduce_scatter() {
    std::vector<char> values((const char*)item.in, (const char*)item.in + n * item.count * unit);
    scale(values.data(), n * item.count, item.type, item.reduction.factor);
    auto begin = [&](size_t i) { return item.count * i; };
    auto total = [&](char* at, size_t count) { scale(at, count, item.type, last_factor()); };
    if (n > 1 && !go_round(values.data(), begin, rank + n - 1, n - 1, n - 1, total)) return false;
    memcpy(item.out, values.data() + begin(rank) * unit, item.count * unit);
    return true;
  }

  bool all_gather() {
    auto* values = (char*)item.out;
    const size_t bytes = item.count * unit;
    if (item.in != values + rank * bytes) memmove(values + rank * bytes, item.in, bytes);
    auto begin = [&](size_t i) { return item.count * i; };
    return n == 1 || go_round(values, begin, rank, 0, n - 1, [](char*, size_t) {});
  }

  bool broadcast() {
    const size_t bytes = item.count * unit, place = chunk(rank + n - (size_t)item.peer);
    auto* values = (char*)item.out;
    if (place == 0 && item.in != item.out) memmove(values, item.in, bytes);
    if (place > 0 && !receive(values, bytes)) return false;
    return place + 1 == n || send_on(values, bytes);
  }

  bool reduce() {
    const size_t bytes = item.count * unit, place = chunk(rank + n - (size_t)item.peer - 1);
    std::vector<char> values((const char*)item.in, (const char*)item.in + bytes), come(bytes);
    scale(values.data(), item.count, item.type, item.reduction.factor);
    if (place > 0) {
      if (!receive(come.data(), bytes)) return false;
      reduce_into(values.data(), come.data(), item.count, item.type, item.reduction);
    }
    if (place + 1 < n) return send_on(values.data(), bytes);
    scale(values.data(), item.count, item.type, last_factor());
    memcpy(item.out, values.data(), bytes);
    return true;
  }

  bool all_to_all() {
    const size_t bytes = item.count * unit;
    std::vector<Message> sends, receives;
    for (size_t p = 0; p < n; p++) {
      sends.push_back({(int)p, (char*)item.in + p * bytes, bytes, kind});
      receives.push_back({(int)p, (char*)item.out + p * bytes, bytes, kind});
    }
    return wire.exchange(std::move(sends), std::move(receives));
  }
};

}  // namespace

bool run_collective(Wire& wire, const Item& item) {
  Ring ring{wire, item};
  switch (item.call) {
    case Call::all_reduce: return ring.all_reduce();
    case Call::reduce: return ring.reduce();
    case Call::broadcast: return ring.broadcast();
    case Call::all_gather: return ring.all_gather();
    case Call::reduce_scatter: return ring.reduce_scatter();
    default: return ring.all_to_all();
  }
}

}  // namespace fake_cuda
