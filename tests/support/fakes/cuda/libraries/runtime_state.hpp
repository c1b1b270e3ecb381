// What the files of the fake runtime share: a thread's last error, and finding streams.
#pragma once
#include "context.hpp"
#include "device.hpp"
#include "graphs.hpp"
#include "memory.hpp"
#include "runtime_types.hpp"
#include "trace.hpp"

namespace fake_cuda {

inline thread_local cudaError_t last_error = cudaSuccess;

inline cudaError_t noted(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

inline Stream* runtime_stream(void* handle) { return stream_of(handle, current_device()); }

inline cudaError_t answer(Result result) {
  switch (result) {
    case Result::done: return cudaSuccess;
    case Result::no_memory: return noted(cudaErrorMemoryAllocation);
    case Result::already: return noted(cudaErrorHostMemoryAlreadyRegistered);
    case Result::not_pinned: return noted(cudaErrorHostMemoryNotRegistered);
    default: return noted(cudaErrorInvalidValue);
  }
}

}  // namespace fake_cuda

// Returns the error of a call that a capture, of this thread or of another, does not stand.
#define NOT_BESIDE_CAPTURES \
  if (invalidates_by_mode()) return noted(900)  // cudaErrorStreamCaptureUnsupported

// Finds stream `s` of a call, or returns its error.
#define STREAM(handle)                                \
  Stream* s = runtime_stream(handle);                 \
  if (!s) return noted(cudaErrorInvalidResourceHandle)
