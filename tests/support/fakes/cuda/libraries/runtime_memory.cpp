// The runtime: memory and copies.
#include <cstring>

#include "options.hpp"
#include "runtime_state.hpp"

using namespace fake_cuda;

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  trace("cudaMalloc", none, (long long)bytes);
  NOT_BESIDE_CAPTURES;
  return answer(allocate(current_device(), bytes, pointer));
}

cudaError_t cudaFree(void* pointer) {
  trace("cudaFree");
  NOT_BESIDE_CAPTURES;
  return pointer ? answer(free_device(pointer)) : cudaSuccess;
}

cudaError_t cudaMallocAsync(void** pointer, size_t bytes, void*) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaFreeAsync(void* pointer, void*) { return cudaFree(pointer); }

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  trace("cudaHostAlloc", none, (long long)bytes);
  NOT_BESIDE_CAPTURES;
  return answer(allocate_pinned(current_device(), bytes, pointer));
}

cudaError_t cudaFreeHost(void* pointer) {
  trace("cudaFreeHost");
  NOT_BESIDE_CAPTURES;
  return pointer ? answer(free_pinned(pointer)) : cudaSuccess;
}

cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  trace("cudaHostRegister", none, (long long)bytes);
  NOT_BESIDE_CAPTURES;
  return answer(pin(current_device(), pointer, bytes));
}

cudaError_t cudaHostUnregister(void* pointer) {
  trace("cudaHostUnregister");
  NOT_BESIDE_CAPTURES;
  return answer(unpin(pointer));
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  trace("cudaMemGetInfo");
  free_and_total(current_device(), free, total);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  Range range;
  const Where type = where(pointer, &range);
  memset(found, 0, sizeof *found);
  found->device = range.device;
  found->type = type == Where::device ? cudaMemoryTypeDevice : type == Where::pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  if (type != Where::pageable) found->devicePointer = (void*)pointer;
  if (type != Where::device) found->hostPointer = (void*)pointer;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, void* stream) {
  STREAM(stream);
  trace("cudaMemcpyAsync", s->ordinal, (long long)bytes);
  copy(s, to, from, bytes, "cudaMemcpyAsync");
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, int) {
  STREAM(nullptr);
  trace("cudaMemcpy", s->ordinal, (long long)bytes);
  NOT_BESIDE_CAPTURES;
  copy(s, to, from, bytes, "cudaMemcpy");
  wait_stream(s, "cudaMemcpy");
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, void* stream) {
  return cudaMemcpyAsync(to, from, bytes, 4, stream);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, int, void* stream) {
  STREAM(stream);
  trace("cudaMemcpy2DAsync", s->ordinal, (long long)(width * height));
  copy_rows(s, to, to_pitch, from, from_pitch, width, height, "cudaMemcpy2DAsync");
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, void* stream) {
  STREAM(stream);
  trace("cudaMemsetAsync", s->ordinal, (long long)bytes);
  fill(s, to, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }

// Variables of kernels, which compute nothing.
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, int) { return cudaSuccess; }

cudaError_t cudaGetSymbolAddress(void** found, const void*) {
  static char variable[1 << 16];
  *found = variable;
  return cudaSuccess;
}

}  // extern "C"
