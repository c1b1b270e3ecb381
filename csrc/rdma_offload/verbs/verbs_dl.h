// libibverbs, opened when it is first asked for; it need not be there.
#pragma once

#include <string>

#include "verbs/verbs_abi.h"

namespace adaptra {

struct VerbsLibrary {
  ibv::Device** (*get_device_list)(int* count);
  void (*free_device_list)(ibv::Device** list);
  ibv::Context* (*open_device)(ibv::Device* device);
  int (*close_device)(ibv::Context* context);
  int (*query_port)(ibv::Context* context, uint8_t port, ibv::PortAttributes* attributes);
  int (*query_gid)(ibv::Context* context, uint8_t port, int index, ibv::Gid* gid);
  // Also of which type; nullptr before rdma-core 32.
  int (*query_gid_entry)(ibv::Context* context, uint32_t port, uint32_t index, ibv::GidEntry* entry,
                         uint32_t flags, size_t bytes);
  ibv::Pd* (*alloc_pd)(ibv::Context* context);
  int (*dealloc_pd)(ibv::Pd* pd);
  ibv::Mr* (*reg_mr)(ibv::Pd* pd, void* at, size_t bytes, int access);
  int (*dereg_mr)(ibv::Mr* mr);
  ibv::Channel* (*create_channel)(ibv::Context* context);
  int (*destroy_channel)(ibv::Channel* channel);
  ibv::Cq* (*create_cq)(ibv::Context* context, int entries, void* user, ibv::Channel* channel,
                        int vector);
  int (*destroy_cq)(ibv::Cq* cq);
  int (*get_cq_event)(ibv::Channel* channel, ibv::Cq** cq, void** user);
  void (*ack_cq_events)(ibv::Cq* cq, unsigned count);
  ibv::Qp* (*create_qp)(ibv::Pd* pd, ibv::QpInit* init);
  int (*modify_qp)(ibv::Qp* qp, ibv::QpAttributes* attributes, int which);
  int (*destroy_qp)(ibv::Qp* qp);
  int (*get_async_event)(ibv::Context* context, ibv::AsyncEvent* event);
  void (*ack_async_event)(ibv::AsyncEvent* event);
  const char* (*status_text)(int status);
};

// The library, or nullptr where it is missing.
const VerbsLibrary* verbs_library();

// Why it is missing; empty if it is there.
std::string verbs_missing();

}  // namespace adaptra
