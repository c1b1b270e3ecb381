// The driver API: errors, devices and contexts.
#include <cstring>

#include "attributes.hpp"
#include "context.hpp"
#include "device.hpp"
#include "driver_types.hpp"
#include "errors.hpp"
#include "graphs.hpp"
#include "memory.hpp"
#include "trace.hpp"

using namespace fake_cuda;

extern "C" {

CUresult cuInit(unsigned flags) {
  trace("cuInit");
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  initialise();
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* found) {
  *found = version;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  const ErrorText* found = error_text(error);
  *name = found ? found->driver : nullptr;
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  const ErrorText* found = error_text(error);
  *text = found ? found->text : nullptr;
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetCount(int* count) {
  if (!initialised()) return CUDA_ERROR_NOT_INITIALIZED;
  *count = options().devices;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (!initialised()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!primary(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  if (!primary(device)) return CUDA_ERROR_INVALID_DEVICE;
  *value = device_attribute(attribute, device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char* text, int size, CUdevice device) {
  if (!primary(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (size < 13) return CUDA_ERROR_INVALID_VALUE;
  pci_bus_id(text, size, device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(char* bytes, CUdevice device) {
  if (!primary(device)) return CUDA_ERROR_INVALID_DEVICE;
  uuid(bytes, device);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  trace("cuDevicePrimaryCtxRetain");
  if (!initialised()) return CUDA_ERROR_NOT_INITIALIZED;
  Context* found = primary(device);
  if (!found) return CUDA_ERROR_INVALID_DEVICE;
  found->retained++;
  *context = found;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  trace("cuDevicePrimaryCtxRelease");
  Context* found = primary(device);
  if (!found) return CUDA_ERROR_INVALID_DEVICE;
  if (!found->retained) return CUDA_ERROR_INVALID_CONTEXT;
  found->retained--;  // torch's own use keeps a context on a GPU as well
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  if (!primary(device)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = current_context();
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  set_current((Context*)context);
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) { return cuCtxSetCurrent(context); }

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  *context = current_context();
  set_current(nullptr);
  return CUDA_SUCCESS;
}

}  // extern "C"
