#include "nccl_communicator.hpp"

#include <sys/prctl.h>
#include <thread>

#include "options.hpp"

namespace fake_cuda {
namespace {

enum Notes : int32_t { note_send = 1, note_receive = 2, note_collective = 3 };

}  // namespace

const char* name_of(Call call) {
  switch (call) {
    case Call::send: return "ncclSend";
    case Call::receive: return "ncclRecv";
    case Call::all_reduce: return "ncclAllReduce";
    case Call::reduce: return "ncclReduce";
    case Call::broadcast: return "ncclBroadcast";
    case Call::all_gather: return "ncclAllGather";
    case Call::reduce_scatter: return "ncclReduceScatter";
    default: return "ncclAlltoAll";
  }
}

std::string words(const std::vector<Item>& items) {
  std::string text;
  for (const Item& item : items) {
    text += std::string(text.empty() ? "" : ", ") + name_of(item.call) + " of " + std::to_string(item.count * width(item.type)) + " bytes";
    if (item.call == Call::send) text += " to rank " + std::to_string(item.peer);
    if (item.call == Call::receive) text += " from rank " + std::to_string(item.peer);
  }
  return text;
}

bool Communicator::connect(const std::vector<Item>& items) {
  struct Awaited {
    int peer, kind;
    const char* call;
  };
  std::vector<Awaited> awaited;
  auto want = [&](int peer, int ours, int theirs, const char* call) {
    wire.send_note(peer, {ours, 0, 0, 0});
    awaited.push_back({peer, theirs, call});
  };
  for (const Item& item : items) {
    if (item.call == Call::send || item.call == Call::receive) {
      const bool send = item.call == Call::send;
      char& known = (send ? sends_to : receives_from)[(size_t)item.peer];
      if (!known && item.peer != wire.rank)
        want(item.peer, send ? note_send : note_receive, send ? note_receive : note_send, name_of(item.call));
      known = 1;
    } else if (!collectives_connected) {
      collectives_connected = true;
      for (int p = 0; p < wire.size; p++)
        if (p != wire.rank) want(p, note_collective, note_collective, name_of(item.call));
    }
  }
  for (const Awaited& a : awaited) {
    HostWait waiting("the first " + std::string(a.call) + ", which connects",
                     "rank " + std::to_string(a.peer) + " of communicator " + std::to_string(ordinal));
    Note note{};
    if (!wire.receive_note(a.peer, a.kind, &note)) return false;
  }
  return true;
}

void Communicator::enqueue(Stream* s, std::vector<Item> given) {
  auto items = std::make_shared<const std::vector<Item>>(std::move(given));
  auto self = shared_from_this();
  {
    Lock lock(mutex_);
    left_++;
  }
  auto counted = std::make_shared<bool>(true);
  Op op{Kind::network, "a kernel of NCCL"};
  op.begin = [self, items, counted](Stream* on, uint64_t number) {  // with the devices' lock
    Lock lock(self->mutex_);
    if (!*counted) self->left_++;
    self->work_.push_back({on, number, items});
    self->changed_.notify_all();
  };
  op.doing = [self, items] {
    return words(*items) + ", communicator " + std::to_string(self->ordinal) + ", as rank " + std::to_string(self->wire.rank) +
           " of " + std::to_string(self->wire.size) + "; " + self->wire.doing();
  };
  if (launch(s, std::move(op))) return;
  *counted = false;  // captured: each launch of the graph counts by itself
  Lock lock(mutex_);
  left_--;
}

void Communicator::start() {
  std::thread([self = shared_from_this()] { self->run(); }).detach();
}

void Communicator::run() {
  prctl(PR_SET_NAME, "fake_nccl");
  prctl(PR_SET_TIMERSLACK, 1000);
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !work_.empty() || (stopping_ && left_ == 0); });
    if (work_.empty()) break;
    Work work = std::move(work_.front());
    work_.pop_front();
    lock.unlock();
    std::vector<Message> sends, receives;
    for (const Item& item : *work.items) {
      const size_t bytes = item.count * width(item.type);
      const auto kind = (uint32_t)Call::send;
      if (item.call == Call::send) sends.push_back({item.peer, (char*)item.in, bytes, kind});
      if (item.call == Call::receive) receives.push_back({item.peer, (char*)item.out, bytes, kind});
    }
    bool goes_on = (sends.empty() && receives.empty()) || wire.exchange(std::move(sends), std::move(receives));
    for (const Item& item : *work.items)
      if (goes_on && item.call > Call::receive) goes_on = run_collective(wire, item);
    work.items.reset();
    finish_network(work.stream, work.number, now());
    lock.lock();
    left_--;
    changed_.notify_all();
  }
  wire.close();
}

void Communicator::abort() { wire.abort(); }

void Communicator::drain(const char* why) {
  Lock lock(mutex_);
  if (left_ == 0) return;
  HostWait waiting(why, "communicator " + std::to_string(ordinal));
  changed_.wait(lock, [&] { return left_ == 0; });
}

void Communicator::stop() {
  Lock lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
}

}  // namespace fake_cuda
