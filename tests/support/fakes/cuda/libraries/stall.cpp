#include "stall.hpp"

#include <chrono>
#include <cxxabi.h>
#include <sys/prctl.h>
#include <thread>

#include "options.hpp"
#include "trace.hpp"

namespace fake_cuda {
namespace {

std::string plain(const char* name) {
  int status = 0;
  char* found = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string text = status == 0 && found ? found : name;
  free(found);
  return text.size() > 80 ? text.substr(0, 77) + "..." : text;
}

std::string words(const Op& op) {
  std::string text = plain(op.name);
  if (op.doing) text += " (" + op.doing() + ")";
  return text + ", op " + std::to_string(op.number);
}

std::string reason(const Op& op, const Queue& queue) {
  const Stream* s = op.stream;
  if (queue.holder) return "hardware queue " + std::to_string(queue.ordinal) + ", held by stream " + std::to_string(queue.holder->ordinal);
  const Op& head = queue.ops.front();
  if (&head != &op)
    return "its turn in hardware queue " + std::to_string(queue.ordinal) + ", behind stream " +
           std::to_string(head.stream->ordinal) + ": " + words(head);
  if (s->completed != op.number - 1) return "op " + std::to_string(op.number - 1) + " of its own stream";
  for (const After& a : op.after)
    if (a.stream->completed < a.number) return "stream " + std::to_string(a.stream->ordinal) + " (the legacy default stream's order)";
  if (op.kind == Kind::wait)
    return "the event of stream " + std::to_string(op.passing->stream) + ", op " + std::to_string(op.passing->number);
  return "the device";
}

const Op* first_of(const Stream* s) {
  for (const Op& op : s->queue->ops)
    if (op.stream == s) return &op;
  return nullptr;
}

}  // namespace

bool anything_waits() {
  if (!blocked_threads().empty()) return true;
  State& all = state();
  Lock lock(all.mutex);
  for (auto& device : all.devices)
    for (Stream* s : device.streams)
      if (s->completed < s->launched) return true;
  return false;
}

std::string what_waits() {
  std::string text;
  for (auto& b : blocked_threads()) text += "  thread " + b.thread + " is in " + b.call + ", for " + b.whom + "\n";
  State& all = state();
  Lock lock(all.mutex);
  for (auto& device : all.devices)
    for (Stream* s : device.streams) {
      if (s->completed == s->launched) continue;
      text += "  stream " + std::to_string(s->ordinal) + " (device " + std::to_string(s->device) + ", hardware queue " +
              std::to_string(s->queue->ordinal) + ", " + std::to_string(s->launched - s->completed) + " ops left): ";
      if (s->running)
        text += "in " + words(s->op);
      else if (const Op* op = first_of(s))
        text += words(*op) + ", waits for " + reason(*op, *s->queue);
      text += "\n";
    }
  return text;
}

void watch_for_stalls() {
  prctl(PR_SET_NAME, "fake_gpu_watch");
  uint64_t seen = 0;
  double since = now();
  bool reported = false;
  for (;;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    flush_trace();
    if (progress_count() != seen || !anything_waits()) {
      seen = progress_count();
      since = now();
      reported = false;
    } else if (!reported && now() - since >= options().stall_seconds) {
      reported = true;
      const std::string text = what_waits();
      say("no progress for %.0f s\n%s", now() - since, text.c_str());
    }
  }
}

}  // namespace fake_cuda
