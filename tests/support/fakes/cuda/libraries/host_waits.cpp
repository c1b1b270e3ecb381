// Threads of the program that block in a call, until a stream has passed something.
#include <chrono>
#include <sys/prctl.h>

#include "device_state.hpp"
#include "options.hpp"
#include "stall.hpp"

namespace fake_cuda {
namespace {

std::mutex blocked_mutex;
uint64_t blocked_made = 0;
std::map<uint64_t, Blocked>& blocked() {
  static auto* found = new std::map<uint64_t, Blocked>;
  return *found;
}

std::string place(const Stream* s, uint64_t number) {
  return "stream " + std::to_string(s->ordinal) + " of device " + std::to_string(s->device) + ", op " +
         std::to_string(number);
}

}  // namespace

HostWait::HostWait(std::string call, std::string whom) {
  char thread[17] = "";
  prctl(PR_GET_NAME, thread);
  Lock lock(blocked_mutex);
  key_ = ++blocked_made;
  blocked()[key_] = {thread, std::move(call), std::move(whom)};
  progress();
}

HostWait::~HostWait() {
  Lock lock(blocked_mutex);
  blocked().erase(key_);
  progress();
}

std::vector<Blocked> blocked_threads() {
  Lock lock(blocked_mutex);
  std::vector<Blocked> found;
  for (auto& item : blocked()) found.push_back(item.second);
  return found;
}

void wait_stream(Stream* s, const char* why) {
  State& all = state();
  Lock lock(all.mutex);
  const uint64_t number = s->launched;
  if (s->completed >= number) return;
  HostWait waiting(why, place(s, number));
  all.progressed.wait(lock, [&] { return s->completed >= number; });
}

void wait_device(int device, const char* why) {
  State& all = state();
  Lock lock(all.mutex);
  std::vector<After> before;
  for (Stream* s : all.devices[(size_t)device].streams)
    if (s->completed < s->launched) before.push_back({s, s->launched});
  for (const After& a : before) {
    if (a.stream->completed >= a.number) continue;
    HostWait waiting(why, place(a.stream, a.number));
    all.progressed.wait(lock, [&] { return a.stream->completed >= a.number; });
  }
}

void wait_passing(const std::shared_ptr<Passing>& p, const char* why) {
  if (!p) return;
  State& all = state();
  Lock lock(all.mutex);
  if (p->done) return;
  HostWait waiting(why, "the event of stream " + std::to_string(p->stream) + ", op " + std::to_string(p->number));
  all.progressed.wait(lock, [&] { return p->done; });
}

}  // namespace fake_cuda
