#pragma once
#include "nccl_types.hpp"

namespace fake_cuda {

// An operation of a communicator's own: all values are multiplied before they are added.
struct Reduction {
  ncclRedOp_t op = ncclSum;
  double factor = 1;
};

void reduce_into(void* total, const void* values, size_t count, ncclDataType_t, const Reduction&);
void scale(void* values, size_t count, ncclDataType_t, double factor);

}  // namespace fake_cuda
