// The driver API: streams, events, kernels and functions of the host. Handles are the runtime's own.
#include "attributes.hpp"
#include "context.hpp"
#include "driver_captures.hpp"
#include "events.hpp"
#include "trace.hpp"

using namespace fake_cuda;

namespace {

Stream* find(CUstream handle) {  // null: no such stream, or no context for the default one
  if ((uintptr_t)handle > 2) return stream_of(handle, 0);
  return current_context() ? stream_of(handle, current_context()->device) : nullptr;
}

CUresult kernel(const char* call, CUstream handle) {
  Stream* s = find(handle);
  if (!s) return CUDA_ERROR_INVALID_HANDLE;
  trace(call, s->ordinal);
  launch(s, {Kind::kernel, "kernel", options().kernel_seconds});
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
  if (!current_context()) return CUDA_ERROR_INVALID_CONTEXT;
  Stream* made = create_stream(current_context()->device, flags, priority);
  *stream = made;
  trace("cuStreamCreateWithPriority", made->ordinal);
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy_v2(CUstream handle) {
  Stream* s = (uintptr_t)handle > 2 ? find(handle) : nullptr;
  if (!s) return CUDA_ERROR_INVALID_HANDLE;
  trace("cuStreamDestroy", s->ordinal);
  destroy_stream(s);
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle) {
  Stream* s = find(handle);
  if (!s) return CUDA_ERROR_INVALID_HANDLE;
  trace("cuStreamSynchronize", s->ordinal);
  if (invalidates(s)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  NOT_BESIDE_CAPTURES;
  wait_stream(s, "cuStreamSynchronize");
  return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned) {
  Stream* s = find(handle);
  Event* e = event_of(event);
  if (!s || !e) return CUDA_ERROR_INVALID_HANDLE;
  trace("cuStreamWaitEvent", s->ordinal);
  if (capture_of(s) && last_record(e) && !in_capture(e)) {
    invalidates(s);
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  wait_event(s, e);
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream handle, int* status) {
  Stream* s = find(handle);
  if (!s) return CUDA_ERROR_INVALID_HANDLE;
  *status = capture_status(s);
  return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
  if (*mode < global_mode || *mode > relaxed_mode) return CUDA_ERROR_INVALID_VALUE;
  *mode = exchange_capture_mode(*mode);
  return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture_v2(CUstream handle, int mode) {
  Stream* s = (uintptr_t)handle > 1 ? find(handle) : nullptr;  // the legacy default stream cannot
  if (!s) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  trace("cuStreamBeginCapture", s->ordinal);
  return begin_capture(s, mode) == Captured::done ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
}

CUresult cuStreamEndCapture(CUstream handle, Graph** graph) {
  Stream* s = find(handle);
  if (!s) return CUDA_ERROR_INVALID_HANDLE;
  trace("cuStreamEndCapture", s->ordinal);
  switch (end_capture(s, graph)) {
    case Captured::done: return CUDA_SUCCESS;
    case Captured::unjoined: return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    case Captured::invalidated: return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    case Captured::wrong_thread: return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    default: return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  }
}

CUresult cuEventCreate(CUevent* event, unsigned flags) {
  if (!current_context()) return CUDA_ERROR_INVALID_CONTEXT;
  trace("cuEventCreate");
  *event = create_event(flags);
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event) {
  Event* e = event_of(event);
  if (!e) return CUDA_ERROR_INVALID_HANDLE;
  trace("cuEventDestroy");
  destroy_event(e);
  return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream handle) {
  Stream* s = find(handle);
  Event* e = event_of(event);
  if (!s || !e) return CUDA_ERROR_INVALID_HANDLE;
  trace("cuEventRecord", s->ordinal);
  record(e, s);
  return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event) {
  Event* e = event_of(event);
  if (!e) return CUDA_ERROR_INVALID_HANDLE;
  trace("cuEventQuery");
  if (invalidates(last_record(e))) return CUDA_ERROR_CAPTURED_EVENT;
  NOT_BESIDE_CAPTURES;
  return passed(last_record(e)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event) {
  Event* e = event_of(event);
  if (!e) return CUDA_ERROR_INVALID_HANDLE;
  trace("cuEventSynchronize");
  if (invalidates(last_record(e))) return CUDA_ERROR_CAPTURED_EVENT;
  NOT_BESIDE_CAPTURES;
  wait_passing(last_record(e), "cuEventSynchronize");
  return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent begin, CUevent end) {
  Event *from = event_of(begin), *to = event_of(end);
  if (!from || !to) return CUDA_ERROR_INVALID_HANDLE;
  trace("cuEventElapsedTime");
  switch (elapsed(from, to, milliseconds)) {
    case Elapsed::done: return CUDA_SUCCESS;
    case Elapsed::not_ready: return CUDA_ERROR_NOT_READY;
    default: return CUDA_ERROR_INVALID_HANDLE;
  }
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent begin, CUevent end) {
  return cuEventElapsedTime_v2(milliseconds, begin, end);
}

CUresult cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream stream,
                        void**, void**) {
  return kernel("cuLaunchKernel", stream);
}

CUresult cuLaunchCooperativeKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                   CUstream stream, void**) {
  return kernel("cuLaunchCooperativeKernel", stream);
}

}  // extern "C"
