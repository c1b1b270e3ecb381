// NCCL's reductions, on the host. float8 is left as it is: nothing is known of its numbers here.
#include "nccl_reduce.hpp"

#include <cstring>

namespace fake_cuda {
namespace {

struct Bfloat16 {
  uint16_t bits;
  Bfloat16() = default;
  explicit Bfloat16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    bits = (f != f) ? (uint16_t)0x7fc0 : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
  explicit operator float() const {
    const uint32_t u = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
  }
};

// T as it is stored, A as it is added. Memory need not be aligned.
template <class T, class A>
void combine(void* total, const void* values, size_t count, ncclRedOp_t op) {
  auto* to = (T*)total;
  auto* from = (const T*)values;
  for (size_t i = 0; i < count; i++) {
    const A a = (A)to[i], b = (A)from[i];
    to[i] = (T)(op == ncclProd ? a * b : op == ncclMax ? (a > b ? a : b) : op == ncclMin ? (a < b ? a : b) : a + b);
  }
}

template <class T, class A>
void multiply(void* values, size_t count, double factor) {
  auto* at = (T*)values;
  for (size_t i = 0; i < count; i++) at[i] = (T)(A)((A)at[i] * (A)factor);
}

}  // namespace

void reduce_into(void* total, const void* values, size_t count, ncclDataType_t type, const Reduction& how) {
  switch (type) {
    case ncclInt8: return combine<int8_t, int>(total, values, count, how.op);
    case ncclUint8: return combine<uint8_t, unsigned>(total, values, count, how.op);
    case ncclInt32: return combine<int32_t, int64_t>(total, values, count, how.op);
    case ncclUint32: return combine<uint32_t, uint64_t>(total, values, count, how.op);
    case ncclInt64: return combine<int64_t, int64_t>(total, values, count, how.op);
    case ncclUint64: return combine<uint64_t, uint64_t>(total, values, count, how.op);
    case ncclFloat16: return combine<_Float16, float>(total, values, count, how.op);
    case ncclBfloat16: return combine<Bfloat16, float>(total, values, count, how.op);
    case ncclFloat32: return combine<float, float>(total, values, count, how.op);
    case ncclFloat64: return combine<double, double>(total, values, count, how.op);
    default: return;
  }
}

void scale(void* values, size_t count, ncclDataType_t type, double factor) {
  if (factor == 1) return;
  switch (type) {
    case ncclInt32: return multiply<int32_t, double>(values, count, factor);
    case ncclInt64: return multiply<int64_t, double>(values, count, factor);
    case ncclFloat16: return multiply<_Float16, float>(values, count, factor);
    case ncclBfloat16: return multiply<Bfloat16, float>(values, count, factor);
    case ncclFloat32: return multiply<float, float>(values, count, factor);
    case ncclFloat64: return multiply<double, double>(values, count, factor);
    default: return;
  }
}

}  // namespace fake_cuda
