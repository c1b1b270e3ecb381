// The runtime: kernels. They take time and compute nothing.
#include <cstring>
#include <mutex>
#include <set>
#include <unordered_map>

#include "kernels.hpp"
#include "options.hpp"
#include "runtime_state.hpp"

namespace fake_cuda {
namespace {

struct Functions {
  std::mutex mutex;
  std::unordered_map<const void*, const char*> names;  // of the host's stand-in for a kernel
  std::set<const void*> loaded;
};

Functions& functions() {
  static auto* found = new Functions;
  return *found;
}

thread_local struct {
  dim3 blocks, threads;
  size_t shared;
  void* stream;
} configured;

const char* name_of(const void* function) {
  Functions& all = functions();
  Lock lock(all.mutex);
  auto found = all.names.find(function);
  return found == all.names.end() ? "kernel" : found->second;
}

void load(const void* function, int device) {
  Functions& all = functions();
  {
    Lock lock(all.mutex);
    if (!all.loaded.insert(function).second) return;
  }
  wait_device(device, "the first launch of a kernel, which loads it and waits for the device");
}

cudaError_t start(const char* call, const void* function, dim3 blocks, dim3 threads, void* stream) {
  STREAM(stream);
  const unsigned size = threads.x * threads.y * threads.z;
  if (!blocks.x || !blocks.y || !blocks.z || !size || size > 1024) return noted(cudaErrorInvalidConfiguration);
  const char* name = name_of(function);
  trace_kernel(call, s->ordinal, name, blocks.x * blocks.y * blocks.z, size);
  if (options().lazy_loading) load(function, s->device);
  launch(s, {Kind::kernel, name, options().kernel_seconds});
  return cudaSuccess;
}

}  // namespace

void start_library_kernel(const char* name, Stream* s, double seconds) {
  trace_kernel("cublas", s->ordinal, name, 1, 1);
  launch(s, {Kind::kernel, name, seconds});
}

}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}

void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*, int*) {
  Functions& all = functions();
  Lock lock(all.mutex);
  all.names[function] = name;
}

void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }

unsigned __cudaPushCallConfiguration(dim3 blocks, dim3 threads, size_t shared, void* stream) {
  configured = {blocks, threads, shared, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* blocks, dim3* threads, size_t* shared, void* stream) {
  *blocks = configured.blocks;
  *threads = configured.threads;
  *shared = configured.shared;
  *(void**)stream = configured.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(void** kernel, const void* function) {
  *kernel = (void*)function;
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(void* kernel, dim3 blocks, dim3 threads, void**, size_t, void* stream) {
  return start("cudaLaunchKernel", kernel, blocks, threads, stream);
}

cudaError_t cudaLaunchKernel(const void* function, dim3 blocks, dim3 threads, void**, size_t, void* stream) {
  return start("cudaLaunchKernel", function, blocks, threads, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 blocks, dim3 threads, void**, size_t, void* stream) {
  return start("cudaLaunchCooperativeKernel", function, blocks, threads, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* function, void**) {
  return start("cudaLaunchKernelExC", function, how->gridDim, how->blockDim, how->stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->ptxVersion = found->binaryVersion = 80;
  found->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, int, int) { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 4;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 4;
  return cudaSuccess;
}

}  // extern "C"
