#include "graphs.hpp"

#include <algorithm>

#include "device_state.hpp"

namespace fake_cuda {
namespace {

unsigned long long captures_made = 0;
int captures_open = 0;

void join(Capture* c, Stream* s) {
  s->capture = c;
  c->streams.push_back(s);
}

}  // namespace

Captured begin_capture(Stream* s) {
  Lock lock(state().mutex);
  if (s->capture) return Captured::already;
  captures_open++;
  join(new Capture{++captures_made, s, new Graph}, s);
  return Captured::done;
}

Captured end_capture(Stream* s, Graph** out) {
  Lock lock(state().mutex);
  *out = nullptr;
  Capture* c = s->capture;
  if (!c || c->origin != s) return Captured::none;
  for (Stream* part : c->streams) part->capture = nullptr;
  c->open = false;
  captures_open--;
  // The last op of each other stream has to be waited for by some stream of the capture.
  const bool joined = std::all_of(c->streams.begin(), c->streams.end(), [&](Stream* part) { return part == s || !part->unjoined; });
  for (Stream* part : c->streams) part->unjoined = false;
  if (joined) *out = c->graph;  // the capture's own few bytes stay, for events that point to it
  return joined ? Captured::done : Captured::unjoined;
}

Capture* capture_of(Stream* s) {
  Lock lock(state().mutex);
  return s->capture;
}

bool captures() {
  Lock lock(state().mutex);
  return captures_open != 0;
}

bool add_to_capture(Stream* s, Op& op) {
  if (op.kind == Kind::wait && op.passing->capture) {
    if (!op.passing->capture->open) op.passing->done = true;  // nothing that could still come
    else if (!s->capture) join(op.passing->capture, s);
  }
  if (!s->capture) return false;
  switch (op.kind) {
    case Kind::record:
      op.passing->capture = s->capture;
      op.passing->stream = s->ordinal;
      op.passing->from = s;
      break;
    case Kind::wait:
      if (op.passing->from && op.passing->from != s) op.passing->from->unjoined = false;
      break;
    default:
      op.stream = s;
      s->capture->graph->ops.push_back(op);
      s->unjoined = s != s->capture->origin;
  }
  return true;
}

void launch_graph(const Graph& graph, Stream* s) {
  for (const Op& op : graph.ops) launch(s, op);
}

}  // namespace fake_cuda
