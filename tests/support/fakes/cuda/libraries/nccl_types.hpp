// Of nccl.h (2.29), what the fake answers to.
#pragma once
#include <cstddef>
#include <cstdint>

constexpr int nccl_version = 22907;

enum ncclResult_t : int {
  ncclSuccess, ncclUnhandledCudaError, ncclSystemError, ncclInternalError, ncclInvalidArgument,
  ncclInvalidUsage, ncclRemoteError, ncclInProgress,
};

enum ncclDataType_t : int {
  ncclInt8, ncclUint8, ncclInt32, ncclUint32, ncclInt64, ncclUint64, ncclFloat16, ncclFloat32,
  ncclFloat64, ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2, ncclNumTypes,
};

enum ncclRedOp_t : int { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg, ncclNumOps };

struct ncclUniqueId {
  char internal[128];
};

namespace fake_cuda {

inline size_t width(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 8;
  }
}

}  // namespace fake_cuda
