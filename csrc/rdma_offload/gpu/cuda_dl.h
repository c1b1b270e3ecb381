// The CUDA driver, opened when it is first asked for; it need not be there.
#pragma once

#include <string>

#include "gpu/cuda_abi.h"

namespace adaptra {

struct CudaLibrary {
  cuda::Result (*init)(unsigned flags);
  cuda::Result (*driver_version)(int* version);
  cuda::Result (*error_name)(cuda::Result error, const char** name);
  cuda::Result (*error_text)(cuda::Result error, const char** text);
  cuda::Result (*device_get)(cuda::Ordinal* device, int ordinal);
  cuda::Result (*device_count)(int* count);
  cuda::Result (*pci_bus_id)(char* id, int bytes, cuda::Ordinal device);
  cuda::Result (*context_retain)(cuda::Context* context, cuda::Ordinal device);
  cuda::Result (*context_release)(cuda::Ordinal device);
  cuda::Result (*context_set)(cuda::Context context);
  cuda::Result (*context_get)(cuda::Context* context);
  cuda::Result (*stream_create)(cuda::Stream* stream, unsigned flags, int priority);
  cuda::Result (*stream_destroy)(cuda::Stream stream);
  cuda::Result (*stream_wait)(cuda::Stream stream, cuda::Event event, unsigned flags);
  cuda::Result (*stream_capturing)(cuda::Stream stream, int* status);
  cuda::Result (*event_create)(cuda::Event* event, unsigned flags);
  cuda::Result (*event_destroy)(cuda::Event event);
  cuda::Result (*event_record)(cuda::Event event, cuda::Stream stream);
  cuda::Result (*event_query)(cuda::Event event);
  cuda::Result (*event_elapsed)(float* milliseconds, cuda::Event begin, cuda::Event end);
  cuda::Result (*host_alloc)(void** at, size_t bytes, unsigned flags);
  cuda::Result (*host_free)(void* at);
  cuda::Result (*host_register)(void* at, size_t bytes, unsigned flags);
  cuda::Result (*host_unregister)(void* at);
  cuda::Result (*copy_to_host)(void* to, cuda::Address from, size_t bytes, cuda::Stream stream);
  cuda::Result (*copy_to_device)(cuda::Address to, const void* from, size_t bytes,
                                 cuda::Stream stream);
  // Not there in every driver; nullptr then.
  cuda::Result (*capture_mode)(int* mode);
};

// The library, started; or nullptr where it is missing, or of no use.
const CudaLibrary* cuda_library();

// Why; empty if it is there.
std::string cuda_missing();

// "CUDA_ERROR_LAUNCH_FAILED (719, unspecified launch failure)".
std::string cuda_words(cuda::Result error);

}  // namespace adaptra
