// For the driver's calls that a capture does not stand.
#pragma once
#include "driver_types.hpp"
#include "graphs.hpp"

// Returns the error of a call that a capture, of this thread or of another, does not stand.
#define NOT_BESIDE_CAPTURES \
  if (fake_cuda::invalidates_by_mode()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
