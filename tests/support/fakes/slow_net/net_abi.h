// The part of NCCL's interface to network plugins (version 10, which NCCL 2.26 to 2.30 load) that
// is used here, under names of our own: so nothing of NCCL is needed where the plugin is built.
#pragma once

#include <cstddef>
#include <cstdint>

namespace slow_net {

enum Result : int { kSuccess = 0, kSystemError = 2, kInvalidUsage = 5, kRemoteError = 6 };
enum LogLevel : int { kWarning = 2 };
enum Memory : int { kHost = 1 };

constexpr size_t kHandleBytes = 128;  // which NCCL carries from the listener to who connects

using Log = void (*)(int level, unsigned long of, const char* file, int line, const char*, ...);

struct Properties {
  const char* name;
  const char* pci_path;
  uint64_t guid;
  int memory;
  int global_registration, forces_flush;
  int megabits;
  int port;
  float latency;
  int most_connections;
  int most_grouped_receives;
  int device_type, device_version;  // 0: the host does all
  int parts, part[4];
  size_t largest_message, largest_of_collectives;
};

// In NCCL's order. Null stands where a plugin has no such function.
struct Net {
  const char* name;
  Result (*init)(Log, void* profiler);
  Result (*devices)(int* count);
  Result (*properties)(int device, Properties*);
  Result (*listen)(int device, void* handle, void** listener);
  Result (*connect)(int device, void* config, void* handle, void** sending, void** device_handle);
  Result (*accept)(void* listener, void** receiving, void** device_handle);
  Result (*register_memory)(void* end, void* at, size_t bytes, int memory, void** registered);
  void* register_dmabuf;
  Result (*deregister_memory)(void* end, void* registered);
  Result (*send)(void* sending, void* from, size_t bytes, int tag, void* registered, void* profiled,
                 void** request);
  Result (*receive)(void* receiving, int count, void** into, size_t* bytes, int* tags,
                    void** registered, void** profiled, void** request);
  Result (*flush)(void* receiving, int count, void** into, int* bytes, void** registered,
                  void** request);
  Result (*test)(void* request, int* done, int* bytes);
  Result (*close_sending)(void*);
  Result (*close_receiving)(void*);
  Result (*close_listener)(void*);
  void* device_memory;
  void* received_on_device;
  void* make_device;
};

}  // namespace slow_net
