#include "gpu/cuda_dl.h"

#include <dlfcn.h>

#include <type_traits>

namespace adaptra {

namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string words(const CudaLibrary& library, cuda::Result error) {
  const char *name = nullptr, *text = nullptr;
  library.error_name(error, &name);
  library.error_text(error, &text);
  return std::string(name != nullptr ? name : "an unknown error") + " (" + std::to_string(error) +
         (text != nullptr ? std::string(", ") + text : "") + ")";
}

struct Opened {
  CudaLibrary library{};
  std::string missing;

  Opened() {
    void* handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      missing = std::string("there is no CUDA driver here (") + dlerror() + "); install NVIDIA's";
      return;
    }
    std::string unknown;
    auto find = [&](auto& function, const char* name) {
      void* found = dlsym(handle, name);
      if (found == nullptr && unknown.empty()) unknown = name;
      function = reinterpret_cast<std::decay_t<decltype(function)>>(found);
    };
    find(library.init, "cuInit");
    find(library.driver_version, "cuDriverGetVersion");
    find(library.error_name, "cuGetErrorName");
    find(library.error_text, "cuGetErrorString");
    find(library.device_get, "cuDeviceGet");
    find(library.device_count, "cuDeviceGetCount");
    find(library.pci_bus_id, "cuDeviceGetPCIBusId");
    find(library.context_retain, "cuDevicePrimaryCtxRetain");
    find(library.context_release, "cuDevicePrimaryCtxRelease_v2");
    find(library.context_set, "cuCtxSetCurrent");
    find(library.context_get, "cuCtxGetCurrent");
    find(library.stream_create, "cuStreamCreateWithPriority");
    find(library.stream_destroy, "cuStreamDestroy_v2");
    find(library.stream_wait, "cuStreamWaitEvent");
    find(library.stream_capturing, "cuStreamIsCapturing");
    find(library.event_create, "cuEventCreate");
    find(library.event_destroy, "cuEventDestroy_v2");
    find(library.event_record, "cuEventRecord");
    find(library.event_query, "cuEventQuery");
    find(library.event_elapsed, "cuEventElapsedTime");
    find(library.host_alloc, "cuMemHostAlloc");
    find(library.host_free, "cuMemFreeHost");
    find(library.host_register, "cuMemHostRegister_v2");
    find(library.host_unregister, "cuMemHostUnregister");
    find(library.copy_to_host, "cuMemcpyDtoHAsync_v2");
    find(library.copy_to_device, "cuMemcpyHtoDAsync_v2");
    if (!unknown.empty()) {
      missing = "the CUDA driver has no " + unknown + ": it is too old; CUDA " +
                version_text(cuda::kOldest) + " or later is needed";
      return;
    }
    library.capture_mode =
        reinterpret_cast<cuda::Result (*)(int*)>(dlsym(handle, "cuThreadExchangeStreamCaptureMode"));
    start();
  }

  void start() {
    int version = 0, count = 0;
    if (const auto error = library.init(0); error != cuda::kSuccess) {
      missing = "the CUDA driver does not start: cuInit says " + words(library, error) +
                "; nvidia-smi should list a GPU";
    } else if (library.driver_version(&version) != cuda::kSuccess || version < cuda::kOldest) {
      missing = "the CUDA driver is of version " + version_text(version) + "; " +
                version_text(cuda::kOldest) + " or later is needed";
    } else if (const auto error = library.device_count(&count);
               error != cuda::kSuccess || count == 0) {
      missing = "the CUDA driver sees no GPU; nvidia-smi should list one, and CUDA_VISIBLE_DEVICES"
                " should name one";
    }
  }
};

const Opened& opened() {
  static const Opened once;
  return once;
}

}  // namespace

const CudaLibrary* cuda_library() {
  return opened().missing.empty() ? &opened().library : nullptr;
}

std::string cuda_missing() { return opened().missing; }

std::string cuda_words(cuda::Result error) { return words(opened().library, error); }

}  // namespace adaptra
