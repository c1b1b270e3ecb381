// cuBLAS and cuBLASLt: each multiplication is a kernel of its own duration. What torch wants besides is a stub that
// answers "done" (tests/support/fakes/cuda/building.py).
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "kernels.hpp"
#include "options.hpp"
#include "runtime_state.hpp"

using namespace fake_cuda;

namespace {

struct Handle {
  void* stream = nullptr;
  int math = 0, pointers = 0;
};

constexpr int success = 0, invalid = 7;

int multiply(const char* name, void* stream) {
  Stream* s = runtime_stream(stream);
  if (!s) return invalid;
  start_library_kernel(name, s, options().kernel_seconds);
  return success;
}

int create(void** made) {
  *made = calloc(1, 256);
  return success;
}

int destroy(void* made) {
  free(made);
  return success;
}

}  // namespace

#define MULTIPLICATION(name) \
  int name(void* handle, ...) { return multiply(#name, ((Handle*)handle)->stream); }

extern "C" {

int cublasCreate_v2(void** handle) {
  *handle = new Handle;
  return success;
}

int cublasDestroy_v2(void* handle) {
  delete (Handle*)handle;
  return success;
}

int cublasSetStream_v2(void* handle, void* stream) {
  ((Handle*)handle)->stream = stream;
  return success;
}

int cublasGetPointerMode_v2(void* handle, int* mode) {
  *mode = ((Handle*)handle)->pointers;
  return success;
}

int cublasSetPointerMode_v2(void* handle, int mode) {
  ((Handle*)handle)->pointers = mode;
  return success;
}

int cublasGetMathMode(void* handle, int* mode) {
  *mode = ((Handle*)handle)->math;
  return success;
}

int cublasSetMathMode(void* handle, int mode) {
  ((Handle*)handle)->math = mode;
  return success;
}

MULTIPLICATION(cublasGemmEx)
MULTIPLICATION(cublasGemmStridedBatchedEx)
MULTIPLICATION(cublasSgemm_v2)
MULTIPLICATION(cublasDgemm_v2)
MULTIPLICATION(cublasSgemmStridedBatched)
MULTIPLICATION(cublasDgemmStridedBatched)
MULTIPLICATION(cublasSgemmEx)
MULTIPLICATION(cublasSgemv_v2)
MULTIPLICATION(cublasDotEx)
MULTIPLICATION(cublasSdot_v2)

size_t cublasLtGetVersion() { return 130100; }
int cublasLtMatmulDescCreate(void** made, int, int) { return create(made); }
int cublasLtMatmulDescDestroy(void* made) { return destroy(made); }
int cublasLtMatmulPreferenceCreate(void** made) { return create(made); }
int cublasLtMatmulPreferenceDestroy(void* made) { return destroy(made); }
int cublasLtMatrixLayoutCreate(void** made, int, uint64_t, uint64_t, int64_t) { return create(made); }
int cublasLtMatrixLayoutDestroy(void* made) { return destroy(made); }

int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* count) {
  memset(results, 0, 64 + 8 + 4 + 4 + 16);  // one algorithm, which needs no workspace
  *count = 1;
  return success;
}

int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                   void*, void*, const void*, void*, size_t, void* stream) {
  return multiply("cublasLtMatmul", stream);
}

}  // extern "C"
