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
constexpr int kRouted = 1;  // where InfiniBand has an address for routers, if any, as for NCCL

// All devices; `use` is called with each while the list is held.
template <class Use>
void for_each_device(const VerbsLibrary& verbs, Use use) {
  int count = 0;
  ibv::Device** list = verbs.get_device_list(&count);
  if (list == nullptr) return;
  for (int n = 0; n < count; ++n) use(list[n]);
  verbs.free_device_list(list);
}

std::string bytes_of(const ibv::Gid& gid) {
  return {reinterpret_cast<const char*>(gid.raw), sizeof gid.raw};
}

// For which version of RoCE the address at `index` is: "RoCE v2", say, or nothing. The library is asked
// where sysfs is not to be seen.
std::string kind_of(const VerbsLibrary& verbs, ibv::Context* context, const std::string& device,
                    int port, int index) {
  std::string kind;
  std::getline(std::ifstream("/sys/class/infiniband/" + device + "/ports/" + std::to_string(port) +
                             "/gid_attrs/types/" + std::to_string(index)),
               kind);
  ibv::GidEntry entry{};
  if (!kind.empty() || verbs.query_gid_entry == nullptr ||
      verbs.query_gid_entry(context, static_cast<uint32_t>(port), static_cast<uint32_t>(index),
                            &entry, 0, sizeof entry) != 0) {
    return kind;
  }
  return entry.type == ibv::kRoceV2 ? "RoCE v2" : "RoCE v1";
}

bool is_zero(const ibv::Gid& gid) { return gid.halves[0] == 0 && gid.halves[1] == 0; }

std::vector<VerbsPort> of_ethernet(const VerbsLibrary& verbs, ibv::Context* context,
                                   const VerbsPort& port, int count, const VerbsChoice& which) {
  EthernetAddresses found(port, which);
  for (int index = 0; index < count; ++index) {
    ibv::Gid gid;
    if (verbs.query_gid(context, static_cast<uint8_t>(port.port), index, &gid) != 0 ||
        is_zero(gid)) {
      continue;
    }
    const std::string type = kind_of(verbs, context, port.device, port.port, index);
    if (!type.empty()) found.add(index, gid, type);
  }
  return found.found();
}

// As VerbsDevice::addresses, but what is at `wanted` now.
std::vector<VerbsPort> addresses_of(const VerbsLibrary& verbs, ibv::Context* context,
                                    const std::string& device, int port,
                                    const ibv::PortAttributes& attributes, int wanted,
                                    const VerbsChoice& which) {
  const bool ethernet = attributes.link_layer == ibv::kEthernet;
  VerbsPort found{device, port, attributes.state == ibv::kPortActive,
                  ethernet ? "Ethernet" : "InfiniBand", -1, {}, {}};
  if (ethernet && wanted < 0) {
    auto all_of_them = of_ethernet(verbs, context, found, attributes.gid_count, which);
    if (!all_of_them.empty()) return all_of_them;
    found.why = which.lacking();
    return {found};
  }
  ibv::Gid gid;
  const auto number = static_cast<uint8_t>(port);
  const int index = std::max(wanted, 0);
  if (wanted < 0 && attributes.gid_count > kRouted &&
      verbs.query_gid(context, number, kRouted, &gid) == 0 && router_of(gid.raw) != 0) {
    return {addressed(found, kRouted, gid, "", "InfiniBand, and routers between subnets can read it")};
  }
  if (verbs.query_gid(context, number, index, &gid) == 0 && !is_zero(gid)) {
    const std::string type = ethernet ? kind_of(verbs, context, device, port, index) : "";
    return {addressed(found, index, gid, type,
                      wanted >= 0 ? "it was asked for" : "InfiniBand has its address there")};
  }
  found.why = "GID " + std::to_string(index) + " is empty";
  return {found};
}

}  // namespace

std::vector<VerbsPort> verbs_ports(const VerbsChoice& which) {
  std::vector<VerbsPort> ports;
  const VerbsLibrary* verbs = verbs_library();
  if (verbs == nullptr) return ports;
  for_each_device(*verbs, [&](ibv::Device* device) {
    ibv::Context* context = verbs->open_device(device);
    if (context == nullptr) return;
    ibv::PortAttributes attributes{};
    for (int port = 1; verbs->query_port(context, port, &attributes) == 0; ++port) {
      ports.push_back(
          addresses_of(*verbs, context, device->name, port, attributes, -1, which).front());
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

std::vector<VerbsPort> VerbsDevice::addresses(int port, int index,
                                              const VerbsChoice& which) {
  const ibv::PortAttributes now = attributes(port);
  std::vector<VerbsPort> all_of_them = addresses_of(verbs, context, name, port, now, index, which);
  if (index < 0) return all_of_them;
  VerbsPort& found = all_of_them.front();
  auto kind = [&](int at) { return kind_of(verbs, context, name, port, at); };
  const std::pair<std::string, std::string> there{found.gid, kind(index)};
  std::lock_guard<std::mutex> lock(mutex_);
  auto first = named_.find({port, index});
  if (first == named_.end()) {
    if (found.gid_index >= 0) named_[{port, index}] = there;
    return all_of_them;
  }
  const auto& had = first->second;
  if (first->second == there) return all_of_them;
  for (int at = 0; at < now.gid_count; ++at) {
    ibv::Gid gid;
    if (verbs.query_gid(context, port, at, &gid) != 0 || bytes_of(gid) != had.first ||
        kind(at) != had.second) {
      continue;
    }
    return {addressed(found, at, gid, had.second,
                      "it was asked for at " + std::to_string(index) + ", and has moved")};
  }
  if (found.gid_index >= 0) first->second = there;  // the port has been given another address
  return all_of_them;
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
