#include "graphs.hpp"

#include <algorithm>
#include <utility>

#include "device_state.hpp"

namespace fake_cuda {
namespace {

unsigned long long captures_made = 0;
std::vector<Capture*> open_captures;
thread_local int thread_mode = global_mode;

void join(Capture* c, Stream* s) {
  s->capture = c;
  c->streams.push_back(s);
}

}  // namespace

Captured begin_capture(Stream* s, int mode) {
  Lock lock(state().mutex);
  if (s->capture) return Captured::already;
  open_captures.push_back(new Capture{++captures_made, s, new Graph, mode});
  join(open_captures.back(), s);
  return Captured::done;
}

Captured end_capture(Stream* s, Graph** out) {
  Lock lock(state().mutex);
  *out = nullptr;
  Capture* c = s->capture;
  if (!c || c->origin != s) return Captured::none;
  if (c->mode != relaxed_mode && c->thread != std::this_thread::get_id()) return Captured::wrong_thread;
  for (Stream* part : c->streams) part->capture = nullptr;
  c->open = false;
  open_captures.erase(std::find(open_captures.begin(), open_captures.end(), c));
  // The last op of each other stream has to be waited for by some stream of the capture.
  const bool joined = std::all_of(c->streams.begin(), c->streams.end(), [&](Stream* part) { return part == s || !part->unjoined; });
  for (Stream* part : c->streams) part->unjoined = false;
  if (!c->valid) return Captured::invalidated;
  if (joined) *out = c->graph;  // the capture's own few bytes stay, for events that point to it
  return joined ? Captured::done : Captured::unjoined;
}

Capture* capture_of(Stream* s) {
  Lock lock(state().mutex);
  return s->capture;
}

int capture_status(Stream* s) {
  Lock lock(state().mutex);
  return !s->capture ? 0 : s->capture->valid ? 1 : 2;
}

int exchange_capture_mode(int mode) { return std::exchange(thread_mode, mode); }

bool invalidates(Stream* s) {
  Lock lock(state().mutex);
  if (s->capture) s->capture->valid = false;
  return s->capture;
}

bool invalidates(const std::shared_ptr<Passing>& p) {
  Lock lock(state().mutex);
  if (!p || !p->capture) return false;
  p->capture->valid = false;
  return true;
}

bool invalidates_all() {
  Lock lock(state().mutex);
  for (Capture* c : open_captures) c->valid = false;
  return !open_captures.empty();
}

bool invalidates_by_mode() {
  Lock lock(state().mutex);
  bool any = false;
  for (Capture* c : open_captures) {
    const bool own = c->thread == std::this_thread::get_id() && c->mode != relaxed_mode;
    const bool of_another = thread_mode == global_mode && c->mode == global_mode;
    if (thread_mode == relaxed_mode || !(own || of_another)) continue;
    c->valid = false;
    any = true;
  }
  return any;
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
