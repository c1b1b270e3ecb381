// The runtime: errors, devices, and how the driver's functions are found.
#include <cstring>

#include "attributes.hpp"
#include "errors.hpp"
#include "graphs.hpp"
#include "runtime_state.hpp"

using namespace fake_cuda;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  initialise();
  *count = options().devices;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  initialise();
  if (!primary(device)) return noted(cudaErrorInvalidDevice);
  set_current(primary(device));
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  trace("cudaDeviceSynchronize");
  if (invalidates_all()) return noted(900);  // cudaErrorStreamCaptureUnsupported
  wait_device(current_device(), "cudaDeviceSynchronize");
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* found) {
  *found = version;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* found) { return cudaDriverGetVersion(found); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (!primary(device)) return noted(cudaErrorInvalidDevice);
  auto is = [&](int attribute) { return device_attribute(attribute, device); };
  memset((void*)p, 0, sizeof *p);
  strcpy(p->name, "Fake GPU");
  uuid(p->uuid, device);
  p->totalGlobalMem = options().device_bytes;
  p->sharedMemPerBlock = (size_t)is(8);
  p->regsPerBlock = p->regsPerMultiprocessor = is(12);
  p->warpSize = is(10);
  p->memPitch = 1 << 30;
  p->maxThreadsPerBlock = is(1);
  p->totalConstMem = (size_t)is(9);
  for (int i = 0; i < 3; i++) {
    p->maxThreadsDim[i] = is(2 + i);
    p->maxGridSize[i] = is(5 + i);
  }
  p->major = major;
  p->minor = minor;
  p->textureAlignment = (size_t)is(14);
  p->multiProcessorCount = is(16);
  p->pciBusID = is(33);
  p->memoryBusWidth = is(37);
  p->l2CacheSize = is(38);
  p->maxThreadsPerMultiProcessor = is(39);
  p->asyncEngineCount = is(40);
  p->sharedMemPerMultiprocessor = (size_t)is(81);
  p->sharedMemPerBlockOptin = (size_t)is(97);
  p->maxBlocksPerMultiProcessor = is(106);
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->streamPrioritiesSupported = 1;
  p->cooperativeLaunch = p->hostRegisterSupported = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int device) {
  if (!primary(device)) return noted(cudaErrorInvalidDevice);
  *value = device_attribute(attribute, device);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int a, int b) {
  *can = a != b;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  if (!primary(device)) return noted(cudaErrorInvalidDevice);
  pci_bus_id(text, size, device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = least_priority;
  if (greatest) *greatest = greatest_priority;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t found = last_error;
  last_error = cudaSuccess;
  return found;
}

cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t e) { return error_text_or_unknown(e)->runtime; }
const char* cudaGetErrorString(cudaError_t e) { return error_text_or_unknown(e)->text; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

static int not_supported() { return cudaErrorNotSupported; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, int* status) {
  *function = driver_function(name);
  if (!*function) *function = (void*)not_supported;  // torch looks up some that it may never call
  if (status) *status = 0;
  return cudaSuccess;
}

}  // extern "C"
