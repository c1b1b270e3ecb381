// NCCL's network between hosts: the plugin that NCCL_NET_PLUGIN names, and messages over it.
#pragma once
#include <cstdint>
#include <deque>
#include <string>

#include "net_abi.h"

namespace fake_cuda {

struct Network {
  uint64_t host = 0;                      // which NCCL_HOSTID names, else the machine's name
  const slow_net::Net* plugin = nullptr;  // null: sockets serve
  size_t largest = 0;                     // bytes that it takes at once
  std::string fault = {};                 // why NCCL_NET cannot be had
};

const Network& network();  // loaded at the first communicator of a process

// Messages of one way of a connection, in order. An owner calls `move` again and again until none is left.
class NetQueue {
 public:
  NetQueue(bool sends, int tag) : sends_(sends), tag_(tag) {}

  void post(char* at, size_t bytes);
  // Starts what the plugin takes and counts what is over; `test`: asks whether anything is. False: an error of the plugin.
  bool move(bool test, size_t* over);
  bool empty() const { return pieces_.empty(); }
  bool starting() const;  // whether the plugin has not taken yet what it might

  void* end = nullptr;  // of the plugin

 private:
  struct Piece {
    void* at;
    size_t bytes;
    bool last;
    void* registered = nullptr;
    void* request = nullptr;
  };
  bool start(Piece&);

  bool sends_;
  int tag_;
  size_t started_ = 0;
  std::deque<Piece> pieces_ = {};
};

struct NetName {  // of who listens: a plugin's handle
  char bytes[slow_net::kHandleBytes];
};

// Both ways to a rank of another host.
class NetLink {
 public:
  NetLink(int rank, int peer) : sending(true, rank), receiving(false, peer), rank_(rank), peer_(peer) {}
  ~NetLink();
  NetLink(const NetLink&) = delete;
  NetLink& operator=(const NetLink&) = delete;

  bool listen(NetName* ours);
  bool connect(NetName* theirs, bool* done);  // again and again until done. False: an error of the plugin

  NetQueue sending, receiving;

 private:
  int rank_, peer_;
  void* listener_ = nullptr;
};

}  // namespace fake_cuda
