// RDMA devices: which there are, and one that is open.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/arena.h"
#include "core/loop.h"
#include "verbs/verbs_addresses.h"
#include "verbs/verbs_dl.h"

namespace adaptra {

// All ports of all devices; none where the library or a device is missing.
std::vector<VerbsPort> verbs_ports(const VerbsChoice& which);

class VerbsDevice : public std::enable_shared_from_this<VerbsDevice> {
 public:
  using Failed = std::function<void(const std::string& why)>;

  // Throws std::runtime_error where there is no such device.
  static std::shared_ptr<VerbsDevice> open(const std::string& name, std::shared_ptr<Arena> arena,
                                           Loop& loop);
  ~VerbsDevice();

  ibv::PortAttributes attributes(int port) const;

  // A port's addresses by which another one may find it, as they are now, the best one first: on
  // Ethernet one of each kind, of `which` alone, or the one at an `index` that is not negative. Never
  // none: a port without any has one whose index is -1. A kernel may put an address that was gone for
  // a while (the link was down) at another index: the one that `index` first had is looked for there.
  std::vector<VerbsPort> addresses(int port, int index, const VerbsChoice& which);

  // The key of the arena's memory at `at`, and in `bytes` how much of it, at most as asked, has that
  // key. Memory is registered in large parts when it is first sent. Throws where that fails.
  uint32_t key(const uint8_t* at, uint64_t* bytes);

  // Call `failed`, on the loop's thread, when the port goes down or something happens to `qp`.
  void watch(ibv::Qp* qp, int port, Failed failed);
  void unwatch(ibv::Qp* qp);

  // It has failed as a whole, and has to be opened again.
  bool dead() const { return dead_; }

  const VerbsLibrary& verbs;
  const std::string name;
  ibv::Pd* pd = nullptr;
  ibv::Context* context = nullptr;

 private:
  VerbsDevice(std::string name, std::shared_ptr<Arena> arena, Loop& loop);
  // On the loop's thread, without mutex_.
  void ready();                                 // the device has an asynchronous event
  void happened(const ibv::AsyncEvent& event);  // call the watchers that it concerns

  struct Watcher {
    int port;
    Failed failed;
  };
  const std::shared_ptr<Arena> arena_;
  Loop& loop_;
  std::atomic<bool> dead_{false};
  std::mutex mutex_;
  std::map<uint64_t, ibv::Mr*> parts_;  // of the arena
  std::map<ibv::Qp*, Watcher> watchers_;
  std::map<std::pair<int, int>, std::pair<std::string, std::string>> named_;  // port, index: GID, kind
};

}  // namespace adaptra
