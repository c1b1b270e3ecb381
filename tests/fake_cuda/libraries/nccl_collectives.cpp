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

  size_t chunk(size_t i) const { return (i + 2 * n) % n; }
  int next() const { return (int)((rank + 1) % n); }
  int previous() const { return (int)((rank + n - 1) % n); }

  bool pass(char* out, size_t out_bytes, char* in, size_t in_bytes) {
    return wire.exchange({{next(), out, out_bytes, kind}}, {{previous(), in, in_bytes, kind}});
  }
  bool send_on(char* out, size_t bytes) { return wire.exchange({{next(), out, bytes, kind}}, {}); }
  bool receive(char* in, size_t bytes) { return wire.exchange({}, {{previous(), in, bytes, kind}}); }

  // Chunk i goes from rank to rank and gathers their values; it ends, in total, on rank i + last.
  template <class Begin>
  bool reduce_chunks(char* values, Begin begin, size_t last) {
    std::vector<char> come;
    for (size_t step = 0; step + 1 < n; step++) {
      const size_t out = chunk(rank + n - last - 1 - step), in = chunk(out + n - 1);
      const size_t in_count = begin(in + 1) - begin(in);
      come.resize(in_count * unit);
      if (!pass(values + begin(out) * unit, (begin(out + 1) - begin(out)) * unit, come.data(), come.size())) return false;
      reduce_into(values + begin(in) * unit, come.data(), in_count, item.type, item.reduction);
    }
    return true;
  }

  template <class Begin>
  bool gather_chunks(char* values, Begin begin, size_t own) {
    for (size_t step = 0; step + 1 < n; step++) {
      const size_t out = chunk(own + n - step), in = chunk(out + n - 1);
      if (!pass(values + begin(out) * unit, (begin(out + 1) - begin(out)) * unit, values + begin(in) * unit,
                (begin(in + 1) - begin(in)) * unit))
        return false;
    }
    return true;
  }

  double last_factor() const { return item.reduction.op == ncclAvg ? 1.0 / (double)n : 1.0; }

  bool all_reduce() {
    auto* values = (char*)item.out;
    if (item.in != item.out) memmove(values, item.in, item.count * unit);
    scale(values, item.count, item.type, item.reduction.factor);
    auto begin = [&](size_t i) { return item.count * i / n; };
    if (!reduce_chunks(values, begin, n - 1)) return false;
    const size_t own = chunk(rank + 1);
    scale(values + begin(own) * unit, begin(own + 1) - begin(own), item.type, last_factor());
    return gather_chunks(values, begin, own);
  }

  bool reduce_scatter() {
    std::vector<char> values((const char*)item.in, (const char*)item.in + n * item.count * unit);
    scale(values.data(), n * item.count, item.type, item.reduction.factor);
    auto begin = [&](size_t i) { return item.count * i; };
    if (!reduce_chunks(values.data(), begin, 0)) return false;
    char* own = values.data() + begin(rank) * unit;
    scale(own, item.count, item.type, last_factor());
    memcpy(item.out, own, item.count * unit);
    return true;
  }

  bool all_gather() {
    auto* values = (char*)item.out;
    const size_t bytes = item.count * unit;
    if (item.in != values + rank * bytes) memmove(values + rank * bytes, item.in, bytes);
    return gather_chunks(values, [&](size_t i) { return item.count * i; }, rank);
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
