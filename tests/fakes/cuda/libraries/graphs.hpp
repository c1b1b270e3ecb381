// Graphs: what is launched on streams that are being captured, to be launched again as a whole.
//
// A graph's ops run one after the other on the stream that it is launched on, in the order of their capture.
#pragma once
#include <vector>

#include "device.hpp"

namespace fake_cuda {

struct Graph {
  std::vector<Op> ops;
};

struct Capture {
  unsigned long long id;
  Stream* origin;
  Graph* graph;
  bool open = true;
  std::vector<Stream*> streams = {};  // the origin, and those that have waited for events of others
};

enum class Captured { done, already, none, unjoined };

Captured begin_capture(Stream*);
Captured end_capture(Stream*, Graph**);
Capture* capture_of(Stream*);  // null outside a capture
bool captures();               // of any stream
void launch_graph(const Graph&, Stream*);

// Called by `launch`, with the devices' lock. True if the op has become a part of a graph.
bool add_to_capture(Stream*, Op&);

}  // namespace fake_cuda
