// Graphs: what is launched on streams that are being captured, to be launched again as a whole.
//
// A graph's ops run one after the other on the stream that it is launched on, in the order of their capture.
#pragma once
#include <thread>
#include <vector>

#include "device.hpp"

namespace fake_cuda {

struct Graph {
  std::vector<Op> ops;
};

enum CaptureMode { global_mode, thread_local_mode, relaxed_mode };

struct Capture {
  unsigned long long id;
  Stream* origin;
  Graph* graph;
  int mode;
  std::thread::id thread = std::this_thread::get_id();  // that has begun it
  bool open = true, valid = true;
  std::vector<Stream*> streams = {};  // the origin, and those that have waited for events of others
};

enum class Captured { done, already, none, unjoined, invalidated, wrong_thread };

Captured begin_capture(Stream*, int mode);
Captured end_capture(Stream*, Graph**);
Capture* capture_of(Stream*);        // null outside a capture
int capture_status(Stream*);         // none, active, invalidated: as the driver counts them
int exchange_capture_mode(int mode);  // of the calling thread; returns the one before

// What a graph does not stand ends it: no more can be captured, and its end gives an error.
bool invalidates(Stream*);                          // whether the stream was being captured
bool invalidates(const std::shared_ptr<Passing>&);  // whether it was recorded in a capture
bool invalidates_all();                             // whether anything was being captured
// For calls that would be no part of the graph, as to allocate or to ask for an event: whether the
// modes of this thread and of captures forbid them.
bool invalidates_by_mode();

void launch_graph(const Graph&, Stream*);

// Called by `launch`, with the devices' lock. True if the op has become a part of a graph.
bool add_to_capture(Stream*, Op&);

}  // namespace fake_cuda
