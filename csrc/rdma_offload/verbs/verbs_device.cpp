#include "verbs/verbs_device.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <stdexcept>

namespace adaptra {

namespace {

constexpr uint64_t kPart = 16 << 20;  // bytes of the arena that are registered at once

// All devices; `use` is called with each while the list is held.
template <class Use>
void for_each_device(const VerbsLibrary& verbs, Use use) {
  int count = 0;
  ibv::Device** list = verbs.get_device_list(&count);
  if (list == nullptr) return;
  for (int n = 0; n < count; ++n) use(list[n]);
  verbs.free_device_list(list);
}

bool is_zero(const ibv::Gid& gid) { return gid.halves[0] == 0 && gid.halves[1] == 0; }

// How good an address of Ethernet is, and why. Version 2 of RoCE is routed, and an IPv4 address is
// one that an administrator has given to the port.
std::pair<int, const char*> worth(const std::string& type, const ibv::Gid& gid) {
  static constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  const bool v2 = type.find("RoCE v2") != std::string::npos;
  if (std::memcmp(gid.raw, kMapped, sizeof kMapped) == 0) {
    return v2 ? std::pair{5, "RoCE v2, IPv4"} : std::pair{2, "RoCE v1, IPv4: no v2 is there"};
  }
  const bool local = gid.raw[0] == 0xfe && gid.raw[1] == 0x80;
  if (v2 && !local) return {4, "RoCE v2, IPv6: no IPv4 is there"};
  if (v2) return {3, "RoCE v2, link-local: the port has no other address"};
  return {1, "RoCE v1: no v2 is there"};
}

VerbsPort address_of(const VerbsLibrary& verbs, ibv::Context* context, const std::string& device,
                     int port, const ibv::PortAttributes& attributes, int wanted) {
  VerbsPort found{device, port, attributes.state == ibv::kPortActive, "InfiniBand", -1, {}, {}};
  auto take = [&](int index, const ibv::Gid& gid, std::string why) {
    found.gid_index = index;
    found.gid.assign(reinterpret_cast<const char*>(gid.raw), sizeof gid.raw);
    found.why = std::move(why);
  };
  ibv::Gid gid;
  if (attributes.link_layer == ibv::kEthernet) found.link = "Ethernet";
  if (wanted >= 0 || attributes.link_layer != ibv::kEthernet) {
    const int index = std::max(wanted, 0);
    if (verbs.query_gid(context, port, index, &gid) == 0 && !is_zero(gid)) {
      take(index, gid, wanted >= 0 ? "it was asked for" : "InfiniBand has its address there");
    } else {
      found.why = "GID " + std::to_string(index) + " is empty";
    }
    return found;
  }
  const std::string types = "/sys/class/infiniband/" + device + "/ports/" + std::to_string(port) +
                            "/gid_attrs/types/";
  int best = 0;
  for (int index = 0; index < attributes.gid_count && best < 5; ++index) {
    std::string type;
    std::getline(std::ifstream(types + std::to_string(index)), type);
    if (type.empty() || verbs.query_gid(context, port, index, &gid) != 0 || is_zero(gid)) continue;
    const auto [value, why] = worth(type, gid);
    if (value > best) {
      best = value;
      take(index, gid, why);
    }
  }
  if (best == 0) found.why = "it has no GID: give its network interface an address";
  return found;
}

}  // namespace

std::vector<VerbsPort> verbs_ports() {
  std::vector<VerbsPort> ports;
  const VerbsLibrary* verbs = verbs_library();
  if (verbs == nullptr) return ports;
  for_each_device(*verbs, [&](ibv::Device* device) {
    ibv::Context* context = verbs->open_device(device);
    if (context == nullptr) return;
    ibv::PortAttributes attributes{};
    for (int port = 1; verbs->query_port(context, port, &attributes) == 0; ++port) {
      ports.push_back(address_of(*verbs, context, device->name, port, attributes, -1));
    }
    verbs->close_device(context);
  });
  return ports;
}

std::shared_ptr<VerbsDevice> VerbsDevice::open(const std::string& name,
                                               std::shared_ptr<Arena> arena, Loop& loop) {
  if (verbs_library() == nullptr) throw std::runtime_error("no RDMA: " + verbs_missing());
  std::shared_ptr<VerbsDevice> device(new VerbsDevice(name, std::move(arena), loop));
  auto self = device->weak_from_this();
  loop.watch(device->context->async_fd, EPOLLIN, [self](uint32_t) {
    if (auto device = self.lock()) device->ready();
  });
  return device;
}

VerbsDevice::VerbsDevice(std::string name, std::shared_ptr<Arena> arena, Loop& loop)
    : verbs(*verbs_library()), name(std::move(name)), arena_(std::move(arena)), loop_(loop) {
  for_each_device(verbs, [this](ibv::Device* device) {
    if (this->name == device->name && context == nullptr) context = verbs.open_device(device);
  });
  if (context == nullptr) throw std::runtime_error("there is no RDMA device " + this->name);
  fcntl(context->async_fd, F_SETFL, fcntl(context->async_fd, F_GETFL) | O_NONBLOCK);
  pd = verbs.alloc_pd(context);
  if (pd == nullptr) {
    verbs.close_device(context);
    throw std::runtime_error("device " + this->name + " gives no protection domain");
  }
}

VerbsDevice::~VerbsDevice() {
  for (auto& [part, mr] : parts_) {
    if (mr != nullptr) verbs.dereg_mr(mr);  // it may have failed
  }
  verbs.dealloc_pd(pd);
  verbs.close_device(context);
}

ibv::PortAttributes VerbsDevice::attributes(int port) const {
  ibv::PortAttributes attributes{};
  const int error = verbs.query_port(context, port, &attributes);
  if (error != 0) {
    throw std::runtime_error("port " + std::to_string(port) + " of " + name + ": " +
                             std::strerror(error));
  }
  return attributes;
}

VerbsPort VerbsDevice::address(int port, int index) const {
  return address_of(verbs, context, name, port, attributes(port), index);
}

uint32_t VerbsDevice::key(const uint8_t* at, uint64_t* bytes) {
  const uint64_t offset = arena_->offset(at), part = offset / kPart;
  *bytes = std::min(*bytes, (part + 1) * kPart - offset);
  std::lock_guard<std::mutex> lock(mutex_);
  ibv::Mr*& mr = parts_[part];
  if (mr == nullptr) {
    arena_->keep_pages();  // the device knows pages, not addresses
    auto* begin = const_cast<uint8_t*>(at) - offset % kPart;
    mr = verbs.reg_mr(pd, begin, std::min(kPart, arena_->size() - part * kPart), 0);
  }
  if (mr == nullptr) {
    throw std::runtime_error(name + " cannot register memory: " + std::strerror(errno) +
                             " (`ulimit -l` should say unlimited)");
  }
  return mr->lkey;
}

void VerbsDevice::watch(ibv::Qp* qp, int port, Failed failed) {
  std::lock_guard<std::mutex> lock(mutex_);
  watchers_[qp] = {port, std::move(failed)};
}

void VerbsDevice::unwatch(ibv::Qp* qp) {
  std::lock_guard<std::mutex> lock(mutex_);
  watchers_.erase(qp);
}

void VerbsDevice::ready() {
  ibv::AsyncEvent event;
  while (!dead_ && verbs.get_async_event(context, &event) == 0) {
    verbs.ack_async_event(&event);  // first: until then its queue pair cannot be destroyed
    happened(event);
  }
}

void VerbsDevice::happened(const ibv::AsyncEvent& event) {
  std::string why;
  std::vector<Failed> failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto collect = [&](auto which) {
      for (auto& [qp, watcher] : watchers_) {
        if (which(qp, watcher)) failed.push_back(watcher.failed);
      }
    };
    switch (event.type) {
      case ibv::kPortDown:
        why = "port " + std::to_string(event.element.port) + " of " + name + " went down here";
        collect([&](ibv::Qp*, Watcher& watcher) { return watcher.port == event.element.port; });
        break;
      case ibv::kDeviceFatal:
        why = name + " has failed here";
        dead_ = true;
        collect([](ibv::Qp*, Watcher&) { return true; });
        break;
      case ibv::kQpFatal:
      case ibv::kQpRequest:
      case ibv::kQpAccess:
        why = "a queue pair of " + name + " has failed here";
        collect([&](ibv::Qp* qp, Watcher&) { return qp == event.element.qp; });
        break;
      default:
        break;
    }
  }
  if (dead_) loop_.unwatch(context->async_fd);
  for (auto& one : failed) one(why);
}

}  // namespace adaptra
