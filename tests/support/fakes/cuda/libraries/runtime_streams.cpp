// The runtime: streams and events.
#include "events.hpp"
#include "graphs.hpp"
#include "runtime_state.hpp"

using namespace fake_cuda;

// Finds event `e` of a call, or returns its error.
#define EVENT(handle)            \
  Event* e = event_of(handle);   \
  if (!e) return noted(cudaErrorInvalidResourceHandle)

extern "C" {

cudaError_t cudaStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  Stream* made = create_stream(current_device(), flags, priority);
  trace("cudaStreamCreateWithPriority", made->ordinal);
  *stream = made;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(void** stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
cudaError_t cudaStreamCreate(void** stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaStreamDestroy(void* stream) {
  STREAM(stream);
  trace("cudaStreamDestroy", s->ordinal);
  return (uintptr_t)stream > 2 && destroy_stream(s) ? cudaSuccess : noted(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamSynchronize(void* stream) {
  STREAM(stream);
  trace("cudaStreamSynchronize", s->ordinal);
  if (invalidates(s)) return noted(900);  // cudaErrorStreamCaptureUnsupported
  NOT_BESIDE_CAPTURES;
  wait_stream(s, "cudaStreamSynchronize");
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(void* stream) {
  STREAM(stream);
  trace("cudaStreamQuery", s->ordinal);
  if (invalidates(s)) return noted(900);
  NOT_BESIDE_CAPTURES;
  return passed(s) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  STREAM(stream);
  EVENT(event);
  trace("cudaStreamWaitEvent", s->ordinal);
  // What was recorded before a capture is no part of the graph.
  if (capture_of(s) && last_record(e) && !in_capture(e)) {
    invalidates(s);
    return noted(905);  // cudaErrorStreamCaptureIsolation
  }
  wait_event(s, e);
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(void* stream, int* priority) {
  STREAM(stream);
  *priority = s->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamGetId(void* stream, unsigned long long* id) {
  STREAM(stream);
  *id = (unsigned long long)s->ordinal;
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  STREAM(stream);
  trace("cudaLaunchHostFunc", s->ordinal);
  launch(s, {Kind::host_function, "a function of the host", 0, [=] { function(argument); }});
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(void* stream, void (*function)(void*, cudaError_t, void*), void* argument, unsigned) {
  STREAM(stream);
  trace("cudaStreamAddCallback", s->ordinal);
  launch(s, {Kind::host_function, "a callback", 0, [=] { function(stream, cudaSuccess, argument); }});
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(void** event, unsigned flags) {
  trace("cudaEventCreate");
  current_device();
  *event = create_event(flags);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(void** event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(void* event) {
  EVENT(event);
  trace("cudaEventDestroy");
  destroy_event(e);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(void* event, void* stream) {
  STREAM(stream);
  EVENT(event);
  trace("cudaEventRecord", s->ordinal);
  record(e, s);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(void* event, void* stream, unsigned) { return cudaEventRecord(event, stream); }

cudaError_t cudaEventQuery(void* event) {
  EVENT(event);
  trace("cudaEventQuery");
  if (invalidates(last_record(e))) return noted(907);  // cudaErrorCapturedEvent
  NOT_BESIDE_CAPTURES;
  return passed(last_record(e)) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(void* event) {
  EVENT(event);
  trace("cudaEventSynchronize");
  if (invalidates(last_record(e))) return noted(907);
  NOT_BESIDE_CAPTURES;
  wait_passing(last_record(e), "cudaEventSynchronize");
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, void* begin, void* end) {
  Event *from = event_of(begin), *to = event_of(end);
  if (!from || !to) return noted(cudaErrorInvalidResourceHandle);
  trace("cudaEventElapsedTime");
  switch (elapsed(from, to, milliseconds)) {
    case Elapsed::done: return cudaSuccess;
    case Elapsed::not_ready: return cudaErrorNotReady;
    default: return noted(cudaErrorInvalidResourceHandle);
  }
}

}  // extern "C"
