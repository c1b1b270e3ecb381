// The driver API: memory and copies.
#include "context.hpp"
#include "driver_captures.hpp"
#include "memory.hpp"
#include "options.hpp"
#include "trace.hpp"

#include <cstdlib>
#include <fstream>
#include <string>

using namespace fake_cuda;

namespace {

CUresult answer(Result result) {
  switch (result) {
    case Result::done: return CUDA_SUCCESS;
    case Result::no_memory: return CUDA_ERROR_OUT_OF_MEMORY;
    case Result::already: return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    case Result::not_pinned: return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}

// Whether the file names this rank; it may change while the process runs.
bool unpinnable() {
  const char* rank = getenv("RANK");
  if (options().unpinnable.empty() || !rank) return false;
  std::ifstream file(options().unpinnable);
  for (std::string word; file >> word;) {
    if (word == rank) return true;
  }
  return false;
}

CUresult copy_async(const char* call, void* to, const void* from, size_t bytes, CUstream handle) {
  if ((uintptr_t)handle <= 2 && !current_context()) return CUDA_ERROR_INVALID_CONTEXT;
  Stream* s = stream_of(handle, current_context() ? current_context()->device : 0);
  if (!s) return CUDA_ERROR_INVALID_HANDLE;
  trace(call, s->ordinal, (long long)bytes);
  copy(s, to, from, bytes, call);
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  if (!current_context()) return CUDA_ERROR_INVALID_CONTEXT;
  trace("cuMemGetInfo");
  free_and_total(current_context()->device, free, total);
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t bytes) {
  if (!current_context()) return CUDA_ERROR_INVALID_CONTEXT;
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  trace("cuMemAlloc", none, (long long)bytes);
  NOT_BESIDE_CAPTURES;
  void* found = nullptr;
  const Result result = allocate(current_context()->device, bytes, &found);
  *pointer = (CUdeviceptr)found;
  return answer(result);
}

CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
  if (!current_context()) return CUDA_ERROR_INVALID_CONTEXT;
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  trace("cuMemHostAlloc", none, (long long)bytes);
  NOT_BESIDE_CAPTURES;
  if (unpinnable()) return CUDA_ERROR_OUT_OF_MEMORY;
  return answer(allocate_pinned(current_context()->device, bytes, pointer));
}

CUresult cuMemFreeHost(void* pointer) {
  trace("cuMemFreeHost");
  NOT_BESIDE_CAPTURES;
  return answer(free_pinned(pointer));
}

CUresult cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned) {
  if (!current_context()) return CUDA_ERROR_INVALID_CONTEXT;
  trace("cuMemHostRegister", none, (long long)bytes);
  NOT_BESIDE_CAPTURES;
  if (unpinnable()) return CUDA_ERROR_OUT_OF_MEMORY;
  return answer(pin(current_context()->device, pointer, bytes));
}

CUresult cuMemHostUnregister(void* pointer) {
  trace("cuMemHostUnregister");
  NOT_BESIDE_CAPTURES;
  return answer(unpin(pointer));
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  if (where((void*)to) != Where::device) return CUDA_ERROR_INVALID_VALUE;
  return copy_async("cuMemcpyHtoDAsync", (void*)to, from, bytes, stream);
}

CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  if (where((void*)from) != Where::device) return CUDA_ERROR_INVALID_VALUE;
  return copy_async("cuMemcpyDtoHAsync", to, (const void*)from, bytes, stream);
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* begin, size_t* bytes, CUdeviceptr pointer) {
  Range range;
  if (where((void*)pointer, &range) == Where::pageable) return CUDA_ERROR_NOT_FOUND;
  if (begin) *begin = (CUdeviceptr)range.begin;
  if (bytes) *bytes = range.bytes;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* value, int attribute, CUdeviceptr pointer) {
  Range range;
  const Where found = where((void*)pointer, &range);
  if (found == Where::pageable) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext*)value = primary(range.device); break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *(unsigned*)value = found == Where::device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr*)value = pointer; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      if (found == Where::device) return CUDA_ERROR_INVALID_VALUE;
      *(void**)value = (void*)pointer;
      break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(bool*)value = false; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int*)value = range.device; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr*)value = (CUdeviceptr)range.begin; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t*)value = range.bytes; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

}  // extern "C"
