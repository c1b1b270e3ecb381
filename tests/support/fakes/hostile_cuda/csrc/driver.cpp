// The symbols of CUDA's driver. What a real one leaves undefined is an error or a finding here.
#include <cstring>

#include "memory.h"
#include "model.h"

using namespace hostile;

namespace {

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101, kInvalidContext = 201,
              kInvalidHandle = 400, kNotReady = 600, kAlreadyRegistered = 712, kNotRegistered = 713;
constexpr unsigned kNonBlocking = 1, kNoTiming = 2;

int injected(const char* name) {
  const auto found = world().failing.find(name);
  if (found == world().failing.end() || found->second.first-- > 0) return 0;
  found->second.first = 0;
  return found->second.second;
}

// One call on a thread with a context. What goes on in the device meanwhile is the seed's.
template <typename F>
int call(const char* name, F body) {
  Lock lock(world().mutex);
  Device* device = this_thread().device;
  if (device == nullptr) {
    finding(std::string("context: ") + name + " on a thread without a current context");
    return kInvalidContext;
  }
  if (const int code = injected(name)) return code;
  called(lock, *device, name);
  return body(lock, *device);
}

// The stream of a handle; nullptr, with a finding, for one that is not there.
Stream* stream_of(Device& current, void* handle, const char* name) {
  if (handle == nullptr || handle == reinterpret_cast<void*>(1)) return &current.streams.front();
  for (auto& device : world().devices) {
    for (auto& stream : device.streams) {
      if (&stream == handle && stream.alive) return &stream;
    }
  }
  finding(std::string("handle: ") + name + " of a stream that is not there, or no more");
  return nullptr;
}

Event* event_of(void* handle, const char* name) {
  for (auto& device : world().devices) {
    const auto found = device.events.find(static_cast<Event*>(handle));
    if (found != device.events.end() && found->second->alive) return found->second.get();
  }
  finding(std::string("handle: ") + name + " of an event that is not there, or no more");
  return nullptr;
}

int copy(const char* name, void* to, const void* from, size_t bytes, void* handle) {
  return call(name, [&](Lock&, Device& device) {
    Stream* stream = stream_of(device, handle, name);
    if (stream == nullptr) return kInvalidHandle;
    if (bytes == 0) return 0;
    const OpRef made =
        issue(*stream, copy_op(device, to, from, bytes), {{from, bytes, false}, {to, bytes, true}});
    const auto sending = world().sending.find(from);
    if (sending != world().sending.end()) {
      world().sent[sending->second] = made;
      world().sending.erase(sending);
    }
    return 0;
  });
}

}  // namespace

#define CUDA extern "C" __attribute__((visibility("default"))) int

CUDA cuInit(unsigned) {
  Lock lock(world().mutex);
  return injected("cuInit");
}

CUDA cuDriverGetVersion(int* version) {
  *version = 12080;
  return 0;
}

CUDA cuGetErrorName(int code, const char** name) {
  static const std::map<int, const char*> kNames = {
      {0, "CUDA_SUCCESS"}, {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"},
      {100, "CUDA_ERROR_NO_DEVICE"}, {101, "CUDA_ERROR_INVALID_DEVICE"},
      {201, "CUDA_ERROR_INVALID_CONTEXT"}, {400, "CUDA_ERROR_INVALID_HANDLE"},
      {600, "CUDA_ERROR_NOT_READY"}, {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {702, "CUDA_ERROR_LAUNCH_TIMEOUT"}, {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
      {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"}, {719, "CUDA_ERROR_LAUNCH_FAILED"},
  };
  const auto found = kNames.find(code);
  *name = found == kNames.end() ? nullptr : found->second;
  return found == kNames.end() ? kInvalidValue : 0;
}

CUDA cuGetErrorString(int code, const char** text) {
  const int result = cuGetErrorName(code, text);
  if (result == 0) *text = "what the name says";
  return result;
}

CUDA cuDeviceGetCount(int* count) {
  Lock lock(world().mutex);
  *count = static_cast<int>(world().devices.size());
  return injected("cuDeviceGetCount");
}

CUDA cuDeviceGet(int* device, int ordinal) {
  Lock lock(world().mutex);
  if (ordinal < 0 || ordinal >= static_cast<int>(world().devices.size())) return kInvalidDevice;
  *device = ordinal;
  return injected("cuDeviceGet");
}

CUDA cuDeviceGetPCIBusId(char* name, int length, int device) {
  snprintf(name, length, "0000:%02x:00.0", 0x10 + device);
  return 0;
}

CUDA cuDevicePrimaryCtxRetain(void** context, int ordinal) {
  Lock lock(world().mutex);
  if (ordinal < 0 || ordinal >= static_cast<int>(world().devices.size())) return kInvalidDevice;
  if (const int code = injected("cuDevicePrimaryCtxRetain")) return code;
  Device& device = world().devices[ordinal];
  ++device.retained;
  *context = &device;
  return 0;
}

CUDA cuDevicePrimaryCtxRelease_v2(int ordinal) {
  Lock lock(world().mutex);
  if (ordinal < 0 || ordinal >= static_cast<int>(world().devices.size())) return kInvalidDevice;
  Device& device = world().devices[ordinal];
  if (device.retained == 0) {
    finding("context: cuDevicePrimaryCtxRelease without a retain before it");
    return kInvalidContext;
  }
  --device.retained;
  return 0;
}

CUDA cuCtxSetCurrent(void* context) {
  Lock lock(world().mutex);
  Thread& me = this_thread();
  me.device = nullptr;
  for (auto& device : world().devices) {
    if (&device == context) me.device = &device;
  }
  return context == nullptr || me.device != nullptr ? injected("cuCtxSetCurrent") : kInvalidContext;
}

CUDA cuCtxGetCurrent(void** context) {
  Lock lock(world().mutex);
  *context = this_thread().device;
  return 0;
}

CUDA cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  return call("cuStreamCreateWithPriority", [&](Lock&, Device& device) {
    Stream& made = add_stream(device, (flags & kNonBlocking) == 0, "");
    made.name += " of priority " + std::to_string(priority);
    if (made.blocking) {
      finding("stream: " + made.name + " is made to wait for the legacy default stream, and that "
              "for it: it needs CU_STREAM_NON_BLOCKING");
    }
    *stream = &made;
    return 0;
  });
}

CUDA cuStreamDestroy_v2(void* handle) {
  return call("cuStreamDestroy", [&](Lock&, Device& device) {
    Stream* stream = stream_of(device, handle, "cuStreamDestroy");
    if (stream == nullptr || stream->number == 0) return kInvalidHandle;
    stream->alive = false;
    return 0;
  });
}

CUDA cuStreamWaitEvent(void* handle, void* event, unsigned) {
  return call("cuStreamWaitEvent", [&](Lock&, Device& device) {
    Stream* stream = stream_of(device, handle, "cuStreamWaitEvent");
    const Event* waited = event_of(event, "cuStreamWaitEvent");
    if (stream == nullptr || waited == nullptr) return kInvalidHandle;
    if (!waited->record || world().lost == "cuStreamWaitEvent") return 0;  // as if it had passed
    Op op;
    op.kind = Op::Kind::wait;
    op.what = "a wait for an event";
    op.after.push_back(waited->record);
    issue(*stream, std::move(op));
    return 0;
  });
}

CUDA cuStreamIsCapturing(void* handle, int* status) {
  return call("cuStreamIsCapturing", [&](Lock&, Device& device) {
    *status = 0;
    return stream_of(device, handle, "cuStreamIsCapturing") == nullptr ? kInvalidHandle : 0;
  });
}

CUDA cuEventCreate(void** event, unsigned flags) {
  return call("cuEventCreate", [&](Lock&, Device& device) {
    auto made = std::make_unique<Event>(Event{&device, flags, true, nullptr});
    *event = made.get();
    device.events[made.get()] = std::move(made);
    return 0;
  });
}

CUDA cuEventDestroy_v2(void* handle) {
  return call("cuEventDestroy", [&](Lock&, Device&) {
    Event* event = event_of(handle, "cuEventDestroy");
    if (event == nullptr) return kInvalidHandle;
    event->alive = false;
    event->record = nullptr;
    return 0;
  });
}

CUDA cuEventRecord(void* handle, void* at) {
  return call("cuEventRecord", [&](Lock&, Device& device) {
    Event* event = event_of(handle, "cuEventRecord");
    Stream* stream = stream_of(device, at, "cuEventRecord");
    if (event == nullptr || stream == nullptr) return kInvalidHandle;
    if (event->device != stream->device) {
      finding("handle: cuEventRecord of one device's event on another one's stream");
      return kInvalidHandle;
    }
    Op op;
    op.kind = Op::Kind::record;
    op.what = "the record of an event";
    event->record = issue(*stream, std::move(op));
    return 0;
  });
}

CUDA cuEventQuery(void* handle) {
  return call("cuEventQuery", [&](Lock&, Device&) {
    const Event* event = event_of(handle, "cuEventQuery");
    if (event == nullptr) return kInvalidHandle;
    if (!event->record || world().lost == "cuEventQuery") return 0;
    if (!event->record->over()) return kNotReady;
    seen_over(*event->device, *event->record);
    return 0;
  });
}

CUDA cuEventElapsedTime(float* milliseconds, void* from, void* to) {
  return call("cuEventElapsedTime", [&](Lock&, Device&) {
    const Event *first = event_of(from, "cuEventElapsedTime"), *second = event_of(to, "cuEventElapsedTime");
    if (first == nullptr || second == nullptr || first->device != second->device) return kInvalidHandle;
    if ((first->flags | second->flags) & kNoTiming) return kInvalidHandle;
    if (!first->record || !second->record) return kInvalidHandle;
    if (!first->record->over() || !second->record->over()) return kNotReady;
    const double ns = static_cast<double>(second->record->passed) - static_cast<double>(first->record->passed);
    *milliseconds = static_cast<float>(ns * (1 + first->device->drift) * 1e-6);
    return 0;
  });
}

CUDA cuMemHostAlloc(void** at, size_t bytes, unsigned) {
  return call("cuMemHostAlloc", [&](Lock&, Device& device) {
    if (bytes == 0) return kInvalidValue;
    *at = pin(device, bytes);
    return *at == nullptr ? kOutOfMemory : 0;
  });
}

CUDA cuMemFreeHost(void* at) {
  return call("cuMemFreeHost", [&](Lock& lock, Device& device) {
    const Block* block = block_of(at, 1);
    if (block == nullptr || !block->live || block->place != Place::pinned) {
      finding("handle: cuMemFreeHost of memory that it did not give");
      return kInvalidValue;
    }
    host_frees(*block_of(at, 1), "cuMemFreeHost");
    if (const int result = wait_for(lock, device, "cuMemFreeHost")) return result;
    seen_idle(device);
    return unpin(at, Place::pinned, "cuMemFreeHost") ? 0 : kInvalidValue;
  });
}

CUDA cuMemHostRegister_v2(void* at, size_t bytes, unsigned) {
  return call("cuMemHostRegister", [&](Lock&, Device& device) {
    if (at == nullptr || bytes == 0) return kInvalidValue;
    return add_registered(device, at, bytes) ? 0 : kAlreadyRegistered;
  });
}

CUDA cuMemHostUnregister(void* at) {
  return call("cuMemHostUnregister", [&](Lock&, Device&) {
    return unpin(at, Place::registered, "cuMemHostUnregister") ? 0 : kNotRegistered;
  });
}

CUDA cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
  return copy("cuMemcpyHtoDAsync", reinterpret_cast<void*>(to), from, bytes, stream);
}

CUDA cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  return copy("cuMemcpyDtoHAsync", to, reinterpret_cast<void*>(from), bytes, stream);
}
