// A communicator of the fake NCCL: its ranks' sockets and the thread that runs its operations, in their order.
#pragma once
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device.hpp"
#include "nccl_reduce.hpp"
#include "nccl_types.hpp"
#include "nccl_wire.hpp"

namespace fake_cuda {

enum class Call : uint32_t { send = 1, receive, all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all };
const char* name_of(Call);

struct Item {
  Call call;
  const void* in;
  void* out;
  size_t count;
  ncclDataType_t type;
  Reduction reduction = {};
  int peer = -1;  // of a send or receive; the root of a broadcast or reduce
};

std::string words(const std::vector<Item>&);

struct Communicator : std::enable_shared_from_this<Communicator> {
  int ordinal = 0;
  std::string id;
  Wire wire;
  std::vector<Reduction> own_reductions;
  std::vector<char> sends_to, receives_from;  // connected
  bool collectives_connected = false;
  int splits = 0;

  // On the host: what a first use has to wait for. False if aborted or a peer is gone.
  bool connect(const std::vector<Item>&);

  void enqueue(Stream*, std::vector<Item>);  // as one kernel, which starts when the stream comes to it
  void start();                              // the thread
  void abort();
  void drain(const char* why);               // until all is done that was enqueued
  void stop();                               // the thread, once nothing is left

 private:
  struct Work {
    Stream* stream;
    uint64_t number;
    std::shared_ptr<const std::vector<Item>> items;
  };
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> work_;
  int left_ = 0;
  bool stopping_ = false;
};

bool run_collective(Wire&, const Item&);  // nccl_collectives.cpp

}  // namespace fake_cuda
