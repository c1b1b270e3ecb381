// RDMA devices for tests of one thing at a time: two with a port each, whose link, keys and
// addresses the test sets. Every change of a queue pair is recorded; what moves is in moving.h.
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <vector>

#include "moving.h"
#include "verbs/verbs_abi.h"

using namespace adaptra::ibv;

namespace {

constexpr int kDevices = 2, kGids = 8;

struct Port {
  int link = kEthernet, flags = 0, keys = 1, lid = 0;
  Gid gids[kGids] = {};
  uint32_t types[kGids] = {};
};
struct Change {
  QpAttributes to;
  int which;
};

std::mutex& g_mutex = *new std::mutex;
Port g_ports[kDevices];
Device g_devices[kDevices];
std::vector<Change>& g_changes = *new std::vector<Change>;
int g_refused = 0;  // what the next change of a queue pair fails with
int g_registrations = -1;  // that are still possible; negative: any number
std::map<Channel*, Cq*>& g_cqs = *new std::map<Channel*, Cq*>;
moving::Fabric& g_fabric = *new moving::Fabric;

Port& port_of(Context* context) { return g_ports[context->device - g_devices]; }

}  // namespace

extern "C" {

Device** ibv_get_device_list(int* count) {
  auto** list = new Device*[kDevices + 1]();
  for (int n = 0; n < kDevices; ++n) {
    std::snprintf(g_devices[n].name, sizeof g_devices[n].name, "made_up%d", n);
    list[n] = &g_devices[n];
  }
  *count = kDevices;
  return list;
}
void ibv_free_device_list(Device** list) { delete[] list; }
Context* ibv_open_device(Device* device) {
  auto* context = new Context{};
  context->device = device;
  context->async_fd = eventfd(0, EFD_CLOEXEC);
  context->ops.poll_cq = [](Cq* cq, int most, Completion* into) {
    return g_fabric.poll(static_cast<moving::Queue*>(cq), most, into);
  };
  context->ops.request_notify = [](Cq* cq, int) {
    g_fabric.arm(static_cast<moving::Queue*>(cq));
    return 0;
  };
  context->ops.post_send = [](Qp* qp, SendWr* wr, SendWr**) {
    return g_fabric.send(static_cast<moving::Pair*>(qp), wr);
  };
  context->ops.post_receive = [](Qp* qp, ReceiveWr*, ReceiveWr**) {
    return g_fabric.receive(static_cast<moving::Pair*>(qp));
  };
  return context;
}
int ibv_close_device(Context* context) {
  close(context->async_fd);
  delete context;
  return 0;
}
int ibv_query_port(Context* context, uint8_t number, PortAttributes* attributes) {
  if (number != 1) return EINVAL;
  std::lock_guard<std::mutex> lock(g_mutex);
  const Port& port = port_of(context);
  attributes->state = kPortActive;
  attributes->active_mtu = 5;
  attributes->gid_count = kGids;
  attributes->pkey_count = static_cast<uint16_t>(port.keys);
  attributes->lid = static_cast<uint16_t>(port.lid);
  attributes->link_layer = static_cast<uint8_t>(port.link);
  attributes->flags = static_cast<uint8_t>(port.flags);
  return 0;
}
int ibv_query_gid(Context* context, uint8_t, int index, Gid* gid) {
  if (index < 0 || index >= kGids) return -1;
  std::lock_guard<std::mutex> lock(g_mutex);
  *gid = port_of(context).gids[index];
  return 0;
}
// The only way to the type: there is no sysfs with these devices.
int _ibv_query_gid_ex(Context* context, uint32_t number, uint32_t index, GidEntry* entry, uint32_t,
                      size_t bytes) {
  if (number != 1 || index >= kGids || bytes != sizeof *entry) return EINVAL;
  std::lock_guard<std::mutex> lock(g_mutex);
  const Port& port = port_of(context);
  *entry = {port.gids[index], index, number, port.types[index], 0};
  return 0;
}
Pd* ibv_alloc_pd(Context* context) { return new Pd{context, 0}; }
int ibv_dealloc_pd(Pd* pd) { delete pd; return 0; }
Mr* ibv_reg_mr(Pd* pd, void* at, size_t bytes, int) {
  std::lock_guard<std::mutex> lock(g_mutex);
  if (g_registrations == 0) {
    errno = ENOMEM;
    return nullptr;
  }
  if (g_registrations > 0) --g_registrations;
  return g_fabric.open(pd, at, bytes);
}
int ibv_dereg_mr(Mr* mr) { g_fabric.close(mr); return 0; }
Channel* ibv_create_comp_channel(Context* context) {
  return new Channel{context, eventfd(0, EFD_CLOEXEC), 0};
}
int ibv_destroy_comp_channel(Channel* channel) {
  close(channel->fd);
  delete channel;
  return 0;
}
Cq* ibv_create_cq(Context* context, int entries, void*, Channel* channel, int) {
  auto* cq = new moving::Queue{};
  cq->context = context;
  cq->channel = channel;
  cq->entries = entries;
  std::lock_guard<std::mutex> lock(g_mutex);
  g_cqs[channel] = cq;
  return cq;
}
int ibv_destroy_cq(Cq* cq) { delete static_cast<moving::Queue*>(cq); return 0; }
int ibv_get_cq_event(Channel* channel, Cq** cq, void**) {
  uint64_t count;
  if (read(channel->fd, &count, sizeof count) < 0) return -1;
  std::lock_guard<std::mutex> lock(g_mutex);
  *cq = g_cqs.at(channel);
  return 0;
}
void ibv_ack_cq_events(Cq*, unsigned) {}
Qp* ibv_create_qp(Pd* pd, QpInit* init) { return g_fabric.open(pd, *init); }
int ibv_modify_qp(Qp* qp, QpAttributes* to, int which) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_changes.push_back({*to, which});
  if (to->state == kReadyToReceive && g_refused != 0) return g_refused;
  g_fabric.change(static_cast<moving::Pair*>(qp), *to);
  return 0;
}
int ibv_destroy_qp(Qp* qp) { g_fabric.close(static_cast<moving::Pair*>(qp)); return 0; }
int ibv_get_async_event(Context*, AsyncEvent*) { return -1; }
void ibv_ack_async_event(AsyncEvent*) {}
const char* ibv_wc_status_str(int) { return "a status"; }
int ibv_fork_init() { return 0; }

// What tests ask for.

void test_port(int device, int link, int flags, int keys, int lid) {
  std::lock_guard<std::mutex> lock(g_mutex);
  Port& port = g_ports[device];
  port.link = link;
  port.flags = flags;
  port.keys = keys;
  port.lid = lid;
}
void test_gid(int device, int index, const uint8_t* gid, int version) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_ports[device].types[index] = version == 2 ? kRoceV2 : kRoceV1;
  std::memcpy(g_ports[device].gids[index].raw, gid, sizeof(Gid));
}
// Queue pairs find no way, with this error.
void test_refuse(int error) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_refused = error;
}
// Memory can be registered so many times from now on.
void test_registrations(int count) {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_registrations = count;
}
// Links have this delay each way, in microseconds, and this rate, in MB/s; 0: without a limit.
void test_link(int delay, int rate) { g_fabric.link(delay, rate); }
// The most bytes that one queue pair had under way.
uint64_t test_under_way(void) { return g_fabric.most_under_way(); }
uint64_t test_moved(void) { return g_fabric.moved(); }  // bytes, of all
int test_changes(void) {
  std::lock_guard<std::mutex> lock(g_mutex);
  return static_cast<int>(g_changes.size());
}
// Of change `number`, from 0 on: state, which ones are set, partition, timeout, retries, level, local
// address, whether global, index of the own address, hops, traffic class; and the other address.
void test_change(int number, int* values, uint8_t* gid) {
  std::lock_guard<std::mutex> lock(g_mutex);
  const Change& one = g_changes.at(number);
  const Address& address = one.to.address;
  const int found[] = {one.to.state, one.which, one.to.pkey_index, one.to.timeout, one.to.retry_count,
                       address.sl, address.dlid, address.is_global, address.route.sgid_index,
                       address.route.hop_limit, address.route.traffic_class};
  std::memcpy(values, found, sizeof found);
  std::memcpy(gid, address.route.dgid.raw, sizeof(Gid));
}

}
