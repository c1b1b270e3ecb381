// Slow links: a file of lines "2>3 40" (from device 2 to 3) or "2-3 40" (both ways): milliseconds by which each message
// of NCCL is late there. The file is read again when it changes.
#pragma once

namespace fake_cuda {

double arrival(int from, int to, double sent);  // when a message that left `from` at `sent` is all there

}  // namespace fake_cuda
