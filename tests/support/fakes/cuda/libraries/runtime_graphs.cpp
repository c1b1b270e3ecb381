// The runtime: capturing graphs and launching them.
#include "graphs.hpp"
#include "options.hpp"
#include "runtime_state.hpp"

using namespace fake_cuda;

namespace {

constexpr cudaError_t unsupported_in_capture = 900, invalidated = 901, unmatched = 903, unjoined = 904,
                      wrong_thread = 908;

cudaError_t answer(Captured result) {
  switch (result) {
    case Captured::done: return cudaSuccess;
    case Captured::already:
    case Captured::invalidated: return noted(invalidated);
    case Captured::wrong_thread: return noted(wrong_thread);
    case Captured::unjoined: return noted(unjoined);
    default: return noted(unmatched);
  }
}

}  // namespace

extern "C" {

cudaError_t cudaStreamBeginCapture(void* stream, int mode) {
  STREAM(stream);
  trace("cudaStreamBeginCapture", s->ordinal);
  if ((uintptr_t)stream <= 1) return noted(unsupported_in_capture);  // the legacy default stream cannot
  return answer(begin_capture(s, mode));
}

cudaError_t cudaStreamEndCapture(void* stream, Graph** graph) {
  STREAM(stream);
  trace("cudaStreamEndCapture", s->ordinal);
  return answer(end_capture(s, graph));
}

cudaError_t cudaStreamIsCapturing(void* stream, int* status) {
  STREAM(stream);
  *status = capture_status(s);
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id, Graph** graph, void** dependencies,
                                     void** edges, size_t* count) {
  STREAM(stream);
  const Capture* c = capture_of(s);
  *status = capture_status(s);
  if (id) *id = c ? c->id : 0;
  if (graph) *graph = c ? c->graph : nullptr;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(int* mode) {
  if (*mode < global_mode || *mode > relaxed_mode) return noted(cudaErrorInvalidValue);
  *mode = exchange_capture_mode(*mode);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(Graph* graph, void*, size_t* count) {
  *count = graph->ops.size();
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(Graph** executable, Graph* graph, unsigned long long) {
  trace("cudaGraphInstantiate", none, (long long)graph->ops.size());
  *executable = new Graph(*graph);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(Graph** executable, Graph* graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

cudaError_t cudaGraphLaunch(Graph* executable, void* stream) {
  STREAM(stream);
  trace("cudaGraphLaunch", s->ordinal, (long long)executable->ops.size());
  launch_graph(*executable, s);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(Graph* graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(Graph* executable) { return cudaGraphDestroy(executable); }
cudaError_t cudaGraphDebugDotPrint(Graph*, const char*, unsigned) { return cudaSuccess; }

}  // extern "C"
