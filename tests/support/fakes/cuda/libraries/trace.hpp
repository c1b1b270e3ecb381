// The calls that reach the fake, in the order of each thread, for tests/support/fakes/cuda/traces.py.
//
// A line: thread, call, stream (ordinal, or -), size in bytes (or -), more. No addresses and no times, so that two
// runs of one program can be compared.
#pragma once
#include <cstddef>
#include <string>

namespace fake_cuda {

constexpr long long none = -1;

void trace(const char* call, long long stream = none, long long bytes = none, const char* more = "");
void trace_kernel(const char* call, long long stream, const char* mangled, unsigned blocks, unsigned threads);
void flush_trace();

}  // namespace fake_cuda
