// Memory of the devices and pinned memory of the host. Both are this process's own, so the host could read either.
#pragma once
#include <cstddef>

#include "device.hpp"

namespace fake_cuda {

enum class Where { pageable, pinned, device };

struct Range {
  char* begin = nullptr;
  size_t bytes = 0;
  int device = -1;
  bool registered = false;  // the program's own memory, which it has pinned
};

enum class Result { done, invalid, no_memory, already, not_pinned };

Where where(const void*, Range* range = nullptr);

Result allocate(int device, size_t bytes, void** out);
Result free_device(void*);                       // after the device has done what was launched (but see FREE_WAITS)
Result allocate_pinned(int device, size_t bytes, void** out);
Result free_pinned(void*);
Result pin(int device, void*, size_t bytes);
Result unpin(void*);
void free_and_total(int device, size_t* free, size_t* total);

// As cudaMemcpyAsync does it: pageable memory is read before it returns, and written before it returns.
void copy(Stream*, void* to, const void* from, size_t bytes, const char* call);
void copy_rows(Stream*, void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, const char* call);
void fill(Stream*, void* to, int value, size_t bytes);

}  // namespace fake_cuda
