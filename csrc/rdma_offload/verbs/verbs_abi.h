// The part of libibverbs' binary interface (version IBVERBS_1.1, stable since 2006; one function of
// IBVERBS_1.11, which may be missing) that is used here, under names of our own: so nothing has to
// be installed where the engine is built, and a build has verbs wherever the library is.
// tests/network/csrc/test_verbs_abi.cpp holds it against the library's header.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>

namespace adaptra::ibv {

struct Context;
struct Cq;
struct Qp;
struct Srq;

enum PortState : int { kPortActive = 4 };
enum LinkLayer : uint8_t { kInfiniBand = 1, kEthernet = 2 };
enum PortFlags : uint8_t { kGrhRequired = 1 };
enum Access : int { kLocalWrite = 1, kRemoteWrite = 2 };
enum QpType : int { kRc = 2 };
enum QpState : int { kInit = 1, kReadyToReceive = 2, kReadyToSend = 3, kError = 6 };
enum SendFlags : unsigned { kSignaled = 2, kInline = 8 };
enum SendOpcode : int { kRdmaWriteWithImm = 1 };
enum WcOpcode : int { kReceived = 128 };  // a bit of those of receives

enum Status : int {
  kSuccess = 0,
  kFlushed = 5,
  kRemoteFirst = 9,  // of three that say what the other side's device has refused
  kRemoteLast = 11,
  kRetryExceeded = 12,
  kRnrRetryExceeded = 13,
};

enum EventType : int {
  kCqError = 0,
  kQpFatal = 1,
  kQpRequest = 2,
  kQpAccess = 3,
  kDeviceFatal = 8,
  kPortUp = 9,
  kPortDown = 10,
};

enum Attribute : int {  // which ones of QpAttributes are set
  kState = 1 << 0,
  kAccessFlags = 1 << 3,
  kPkeyIndex = 1 << 4,
  kPort = 1 << 5,
  kAddress = 1 << 7,
  kPathMtu = 1 << 8,
  kTimeout = 1 << 9,
  kRetryCount = 1 << 10,
  kRnrRetry = 1 << 11,
  kRqPsn = 1 << 12,
  kMaxReads = 1 << 13,
  kMinRnrTimer = 1 << 15,
  kSqPsn = 1 << 16,
  kMaxReadsHere = 1 << 17,
  kDestinationQp = 1 << 20,
};

struct Device {
  void* ops[2];
  int node_type, transport_type;
  char name[64];
  char dev_name[64];
  char dev_path[256];
  char ibdev_path[256];
};

struct PortAttributes {
  int state, max_mtu, active_mtu, gid_count;
  uint32_t capabilities, max_message, bad_pkeys, qkey_violations;
  uint16_t pkey_count, lid, sm_lid;
  uint8_t lmc, max_vl, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state;
  uint8_t link_layer, flags;
  uint16_t more_capabilities;
};

union Gid {
  uint8_t raw[16];
  uint64_t halves[2];
};

enum GidType : uint32_t { kRoceV1 = 1, kRoceV2 = 2 };

struct GidEntry {
  Gid gid;
  uint32_t index, port, type, interface;
};

struct Pd {
  Context* context;
  uint32_t handle;
};

struct Mr {
  Context* context;
  Pd* pd;
  void* address;
  size_t length;
  uint32_t handle, lkey, rkey;
};

struct Channel {
  Context* context;
  int fd, references;
};

struct Cq {
  Context* context;
  Channel* channel;
  void* cq_context;
  uint32_t handle;
  int entries;
  pthread_mutex_t mutex;
  pthread_cond_t condition;
  uint32_t completion_events, async_events;
};

struct Qp {
  Context* context;
  void* qp_context;
  Pd* pd;
  Cq *send_cq, *receive_cq;
  Srq* srq;
  uint32_t handle, number;
  int state, type;
  pthread_mutex_t mutex;
  pthread_cond_t condition;
  uint32_t events;
};

struct QpCapacity {
  uint32_t max_send, max_receive, max_send_sge, max_receive_sge, max_inline;
};

struct QpInit {
  void* qp_context;
  Cq *send_cq, *receive_cq;
  Srq* srq;
  QpCapacity capacity;
  int type, signal_all;
};

struct Route {
  Gid dgid;
  uint32_t flow_label;
  uint8_t sgid_index, hop_limit, traffic_class;
};

struct Address {
  Route route;
  uint16_t dlid;
  uint8_t sl, src_path_bits, static_rate, is_global, port;
};

struct QpAttributes {
  int state, current_state, path_mtu, migration_state;
  uint32_t qkey, rq_psn, sq_psn, destination_qp;
  unsigned access_flags;
  QpCapacity capacity;
  Address address, alternate;
  uint16_t pkey_index, alternate_pkey_index;
  uint8_t notify_drained, draining, max_reads, max_reads_here, min_rnr_timer, port, timeout,
      retry_count, rnr_retry, alternate_port, alternate_timeout;
  uint32_t rate_limit;
};

struct Sge {
  uint64_t address;
  uint32_t length, lkey;
};

struct SendWr {
  uint64_t id;
  SendWr* next;
  Sge* sges;
  int sge_count, opcode;
  unsigned flags;
  uint32_t immediate;  // in network byte order
  struct {
    uint64_t address;
    uint32_t rkey;
    uint32_t unused[5];
  } remote;
  uint64_t unused[7];
};

struct ReceiveWr {
  uint64_t id;
  ReceiveWr* next;
  Sge* sges;
  int sge_count;
};

struct Completion {
  uint64_t id;
  int status, opcode;
  uint32_t vendor_error, bytes, immediate, qp, source_qp;
  unsigned flags;
  uint16_t pkey_index, slid;
  uint8_t sl, dlid_path_bits;
};

struct AsyncEvent {
  union {
    Cq* cq;
    Qp* qp;
    int port;
  } element;
  int type;
};

struct ContextOps {
  void* unused1[11];
  int (*poll_cq)(Cq* cq, int count, Completion* completions);
  int (*request_notify)(Cq* cq, int solicited_only);
  void* unused2[12];
  int (*post_send)(Qp* qp, SendWr* wr, SendWr** bad);
  int (*post_receive)(Qp* qp, ReceiveWr* wr, ReceiveWr** bad);
  void* unused3[5];
};

struct Context {
  Device* device;
  ContextOps ops;
  int command_fd, async_fd, vectors;
  pthread_mutex_t mutex;
  void* compatibility;
};

}  // namespace adaptra::ibv
