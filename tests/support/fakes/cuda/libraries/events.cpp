#include "events.hpp"

#include <mutex>
#include <unordered_set>

#include "device_state.hpp"

namespace fake_cuda {

struct Event {
  bool timed;
  std::shared_ptr<Passing> passing;
};

namespace {

std::mutex events_mutex;
std::unordered_set<Event*>& events() {
  static auto* found = new std::unordered_set<Event*>;
  return *found;
}

}  // namespace

Event* create_event(unsigned flags) {
  auto* e = new Event{!(flags & without_timing), nullptr};
  Lock lock(events_mutex);
  events().insert(e);
  return e;
}

Event* event_of(void* handle) {
  Lock lock(events_mutex);
  return events().count((Event*)handle) ? (Event*)handle : nullptr;
}

void destroy_event(Event* e) {
  Lock lock(events_mutex);
  events().erase(e);
  delete e;
}

void record(Event* e, Stream* s) {
  auto passing = std::make_shared<Passing>();
  {
    Lock lock(events_mutex);
    e->passing = passing;
  }
  launch(s, {Kind::record, "an event's record", 0, {}, passing});
}

std::shared_ptr<Passing> last_record(Event* e) {
  Lock lock(events_mutex);
  return e->passing;
}

bool in_capture(Event* e) {
  auto passing = last_record(e);
  Lock lock(state().mutex);
  return passing && passing->capture;
}

void wait_event(Stream* s, Event* e) {
  if (auto passing = last_record(e)) launch(s, {Kind::wait, "a wait for an event", 0, {}, passing});
}

Elapsed elapsed(Event* begin, Event* end, float* milliseconds) {
  if (!begin->timed || !end->timed) return Elapsed::invalid;
  auto from = last_record(begin), to = last_record(end);
  if (!from || !to) return Elapsed::invalid;
  Lock lock(state().mutex);
  if (!from->done || !to->done) return Elapsed::not_ready;
  *milliseconds = (float)(1e3 * (to->time - from->time));
  return Elapsed::done;
}

}  // namespace fake_cuda
