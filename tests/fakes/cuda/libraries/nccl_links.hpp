// Slow links: a file of lines "2>3 40" (from device 2 to 3) or "2-3 40" (both ways): milliseconds by which each message
// of NCCL is late there; a second number is the link's bandwidth in MB/s. The file is read again when it changes.
#pragma once
#include <cstddef>

namespace fake_cuda {

// When a message that left `from` at `sent` is all there; messages of one link share its bandwidth.
double arrival(int from, int to, double sent, size_t bytes);

}  // namespace fake_cuda
