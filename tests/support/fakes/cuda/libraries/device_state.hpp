// What device.cpp, host_waits.cpp and stall.cpp share: the state of all devices, behind one mutex.
#pragma once
#include <map>
#include <unordered_set>

#include "device.hpp"

namespace fake_cuda {

struct Device {
  std::vector<Queue*> queues;
  std::vector<Stream*> streams;
  Stream* legacy = nullptr;
  size_t turn = 0;
  double copies_until[3] = {};  // by way: the device has one engine for each, which copies one after the other
};

struct Blocked {
  std::string thread, call, whom;
};

struct State {
  std::mutex mutex;
  std::condition_variable work, progressed, host_function_launched;
  std::vector<Device> devices;
  std::vector<Stream*> running;
  std::deque<Stream*> host_functions;
  std::unordered_set<Stream*> known;
  bool threads_run = false, asked = false;
  double wakes_at = 0;
  int streams_made = 0;
};

State& state();
void wake(State&, double wanted);  // the thread that plays the devices, if it sleeps longer than that; locked

}  // namespace fake_cuda
