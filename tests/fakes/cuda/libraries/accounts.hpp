// Counters of this process, in a file that tests read while it runs (tests/fakes/cuda/accounts.py).
#pragma once
#include <cstdint>

namespace fake_cuda {

enum class Count : int {
  device_bytes, device_peak, pinned_bytes, pinned_peak,
  calls, nccl_calls, launches, kernels, host_wait_us, stalls, streams_made, events, marks,
  how_many,
};

void account(Count what, int64_t more);
void account_peak(Count what, Count peak, int64_t more);
int64_t accounted(Count what);

}  // namespace fake_cuda
