// The memory that operations work on: a device's, which the host cannot touch, and pinned memory.
#pragma once

#include "model.h"

namespace hostile {

enum class Place { device, pinned, registered };

struct Access {
  uintptr_t from, to;
  bool writes;
  size_t stream;
  uint64_t number;
  std::string what;
};

struct Block {
  uintptr_t at;
  size_t bytes;
  Place place;
  Device* device;
  std::string label;
  bool live = true;
  Stream* stream = nullptr;  // of device memory: on whose order it was allocated
  std::vector<Access> accesses;
  std::vector<std::pair<uintptr_t, uintptr_t>> copied;  // pinned memory that copies use now
};

// What stands in memory for want of something better; as numbers they are NaN.
enum class Poison : uint64_t {
  fresh = 0xFFF7F0E5FFF7F0E5,    // never written
  freed = 0xFFF7DEADFFF7DEAD,    // of a block that was given back
  running = 0xFFF70FF5FFF70FF5,  // an output before its operation has ended
  pinned = 0xFFF7C09FFFF7C09F,   // pinned memory that a copy is to reach
};

Block* block_of(const void* at, size_t bytes);  // nullptr: not ours
uint8_t* reach(const void* at);                 // where the device's own hands find it

void open_heaps(int devices);
void close_heaps();  // all memory of all devices
Block& allocate(Device& device, Stream& stream, size_t bytes, const std::string& label);
void give_back(Block& block, const std::string& who);  // on its stream's order
void* pin(Device& device, size_t bytes);
bool add_registered(Device& device, void* at, size_t bytes);
bool unpin(void* at, Place place, const char* call);
std::string pinned_left(int device);

void fill(const void* at, size_t bytes, Poison poison);
std::string poison_in(const void* at, size_t bytes);  // in words; empty: none
uint64_t digest(const void* at, size_t bytes);

// A copy, with what the host must not do meanwhile to pinned memory.
Op copy_op(Device& device, void* to, const void* from, size_t bytes);

// races.cpp: `op` is going to touch memory; its clock is known.
void touch(const Op& op, const Touch& touched);
// The host gives pinned memory back, which nothing may use any more.
void host_frees(Block& block, const char* call);

}  // namespace hostile
