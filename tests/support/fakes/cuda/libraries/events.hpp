// Events: cudaEvent_t and CUevent are pointers to these.
#pragma once
#include <memory>

#include "device.hpp"

namespace fake_cuda {

struct Event;
constexpr unsigned without_timing = 2;  // the flag of event creation

Event* create_event(unsigned flags);
Event* event_of(void* handle);  // null for a handle that is no event
void destroy_event(Event*);
void record(Event*, Stream*);
void wait_event(Stream*, Event*);
std::shared_ptr<Passing> last_record(Event*);  // null before the first
bool in_capture(Event*);                       // recorded last while a graph was being made

enum class Elapsed { done, not_ready, invalid };
Elapsed elapsed(Event* begin, Event* end, float* milliseconds);

}  // namespace fake_cuda
