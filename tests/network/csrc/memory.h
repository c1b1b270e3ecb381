// How many bytes of the heap are in use.
#pragma once

#include <cstdint>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
extern "C" size_t __sanitizer_get_current_allocated_bytes();
inline uint64_t allocated() { return __sanitizer_get_current_allocated_bytes(); }
#else
#include <malloc.h>
inline uint64_t allocated() {
  const auto info = mallinfo2();
  return info.uordblks + info.hblkhd;
}
#endif
