// NVML: what torch.cuda asks for. Devices have the identities that the driver gives them.
#include <cstring>

#include "attributes.hpp"

using namespace fake_cuda;

namespace {

constexpr int success = 0, invalid = 2, unsupported = 3;
int device_of(void* handle) { return (int)(size_t)handle - 1; }

int find(void** handle, int device) {
  if (device < 0 || device >= options().devices) return invalid;
  *handle = (void*)(size_t)(device + 1);
  return success;
}

struct PciInfo {
  char legacy[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char id[32];
};

struct Memory {
  unsigned long long total, free, used;
};

}  // namespace

extern "C" {

int nvmlInit_v2() { return success; }
int nvmlInit() { return success; }
int nvmlInitWithFlags(unsigned) { return success; }
int nvmlShutdown() { return success; }
const char* nvmlErrorString(int error) { return error ? "error of the fake NVML" : "success"; }

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = (unsigned)options().devices;
  return success;
}

int nvmlSystemGetCudaDriverVersion_v2(int* found) {
  *found = version;
  return success;
}

int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  snprintf(text, size, "580.00");
  return success;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) { return find(handle, (int)index); }

int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** handle) {
  unsigned domain = 0, bus = 0;
  return sscanf(id, "%x:%x", &domain, &bus) == 2 ? find(handle, (int)bus - 1) : invalid;
}

int nvmlDeviceGetPciInfo_v3(void* handle, PciInfo* found) {
  memset(found, 0, sizeof *found);
  found->bus = (unsigned)device_of(handle) + 1;
  pci_bus_id(found->id, sizeof found->id, device_of(handle));
  pci_bus_id(found->legacy, sizeof found->legacy, device_of(handle));
  return success;
}

int nvmlDeviceGetUUID(void* handle, char* text, unsigned size) {
  char b[16];
  uuid(b, device_of(handle));
  snprintf(text, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2], b[3],
           b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
  return success;
}

int nvmlDeviceGetName(void*, char* text, unsigned size) {
  snprintf(text, size, "Fake GPU");
  return success;
}

int nvmlDeviceGetMemoryInfo(void*, Memory* found) {
  *found = {options().device_bytes, options().device_bytes, 0};
  return success;
}

int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return success;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) { return unsupported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return unsupported; }

}  // extern "C"
