// What csrc/rdma_offload/cuda_abi.h and cuda_dl.h say of the driver, against its own header.
#include <cuda.h>

#include <type_traits>

#include "gpu/cuda_dl.h"

using namespace adaptra;

// By size and class: handles are pointers to other types here.
template <typename Ours, typename Theirs>
constexpr bool alike() {
  if constexpr (std::is_pointer_v<Ours>) {
    return std::is_pointer_v<Theirs>;
  } else {
    using O = std::conditional_t<std::is_enum_v<Ours>, int, Ours>;
    return !std::is_pointer_v<Theirs> && sizeof(O) == sizeof(Theirs) &&
           (std::is_enum_v<Theirs> || std::is_floating_point_v<O> == std::is_floating_point_v<Theirs>);
  }
}

template <typename... Ours, typename... Theirs>
constexpr bool same(cuda::Result (*)(Ours...), CUresult (*)(Theirs...)) {
  if constexpr (sizeof...(Ours) == sizeof...(Theirs)) {
    return (alike<Ours, Theirs>() && ...);
  } else {
    return false;
  }
}

#define SAME(ours, theirs) \
  static_assert(same(decltype(CudaLibrary::ours)(nullptr), decltype(&theirs)(nullptr)), #theirs)

SAME(init, cuInit);
SAME(driver_version, cuDriverGetVersion);
SAME(error_name, cuGetErrorName);
SAME(error_text, cuGetErrorString);
SAME(device_get, cuDeviceGet);
SAME(device_count, cuDeviceGetCount);
SAME(pci_bus_id, cuDeviceGetPCIBusId);
SAME(context_retain, cuDevicePrimaryCtxRetain);
SAME(context_release, cuDevicePrimaryCtxRelease);
SAME(context_set, cuCtxSetCurrent);
SAME(context_get, cuCtxGetCurrent);
SAME(stream_create, cuStreamCreateWithPriority);
SAME(stream_destroy, cuStreamDestroy);
SAME(stream_wait, cuStreamWaitEvent);
SAME(stream_capturing, cuStreamIsCapturing);
SAME(event_create, cuEventCreate);
SAME(event_destroy, cuEventDestroy);
SAME(event_record, cuEventRecord);
SAME(event_query, cuEventQuery);
SAME(event_elapsed, cuEventElapsedTime);
SAME(host_alloc, cuMemHostAlloc);
SAME(host_free, cuMemFreeHost);
SAME(host_register, cuMemHostRegister);
SAME(host_unregister, cuMemHostUnregister);
SAME(copy_to_host, cuMemcpyDtoHAsync);
SAME(copy_to_device, cuMemcpyHtoDAsync);
SAME(capture_mode, cuThreadExchangeStreamCaptureMode);

static_assert(cuda::kSuccess == CUDA_SUCCESS && cuda::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(cuda::kNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(cuda::kDeinitialized == CUDA_ERROR_DEINITIALIZED);
static_assert(cuda::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(cuda::kCaptureImplicit == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
static_assert(cuda::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(cuda::kEventTiming == CU_EVENT_DEFAULT && cuda::kEventNoTiming == CU_EVENT_DISABLE_TIMING);
static_assert(cuda::kHostPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(cuda::kHostPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(cuda::kCaptureNone == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(cuda::kCaptureRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);

int main() {}
