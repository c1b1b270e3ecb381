// Sockets between the ranks of a communicator, and moving messages over them. Between hosts the data of messages goes
// over NCCL's network plugin, where there is one.
//
// Names of sockets are abstract and made of the communicator's random id, so runs do not meet and nothing is left.
#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nccl_net.hpp"

namespace fake_cuda {

struct Note {  // between the hosts, beside the data
  int32_t kind, a, b, c;
};

constexpr double nccl_seconds = 600;  // that ranks may wait for each other's sockets
constexpr unsigned net_look = 100;   // microseconds between two looks at the plugin

struct Peer {
  int data = -1, control = -1, device = -1;
  uint64_t host = 0;
  std::unique_ptr<NetLink> net = {};  // null: the data goes over the socket as well
  int credits = 0;             // receives of the peer's that nothing has been sent for
  std::deque<Note> notes = {}; // come, and not yet waited for
};

struct Message {
  int peer;
  char* at;
  size_t bytes;
  uint32_t kind;
};

class Wire {
 public:
  // Connects to all others. Empty if all came within the seconds; else what went wrong.
  std::string open(const std::string& id, int rank, int size, int device, double seconds);

  // Moves all messages, those from and to one peer in order. A message leaves when its receive stands posted, as far as
  // the socket or plugin has room; it arrives when its link lets it. `arrived` is then called with its place among the receives of
  // its peer, and says what is to be sent because of it. Blocks. False if aborted.
  using Arrived = std::function<std::vector<Message>(size_t)>;
  bool exchange(std::vector<Message> sends, std::vector<Message> receives, const Arrived& arrived = {});

  void abort();
  void close();
  bool send_note(int peer, Note);
  bool receive_note(int peer, int kind, Note*);  // blocks for a note of that kind. False if aborted or the peer is gone
  std::string doing();                   // what `exchange` waits for

  std::atomic<bool> aborted{false}, lost{false}, misused{false};
  std::vector<Peer> peers;
  int rank = 0, size = 0, device = 0;

 private:
  std::string connect_hosts(double until);  // over the plugin; what went wrong
  int wake_ = -1;  // an eventfd: aborted
  std::mutex doing_mutex_, notes_mutex_;
  std::string doing_;
};

}  // namespace fake_cuda
