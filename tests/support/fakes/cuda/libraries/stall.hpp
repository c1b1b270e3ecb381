// A run in which nothing goes on any more says, for each rank, which stream and which thread waits for what.
#pragma once
#include <string>
#include <vector>

#include "device_state.hpp"

namespace fake_cuda {

void watch_for_stalls();  // the body of a thread
std::vector<Blocked> blocked_threads();

}  // namespace fake_cuda
