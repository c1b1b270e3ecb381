// What verbs_abi.h says of libibverbs, held against the library's own header. Nothing to run: it
// compiles, or it does not.
#include <infiniband/verbs.h>

#include "verbs/verbs_abi.h"

namespace ours = adaptra::ibv;

#define SAME_SIZE(mine, theirs) static_assert(sizeof(ours::mine) == sizeof(theirs), #mine)
#define SAME(mine, field, theirs, their_field)                                                \
  static_assert(offsetof(ours::mine, field) == offsetof(theirs, their_field) &&               \
                    sizeof(ours::mine::field) == sizeof(theirs::their_field),                 \
                #mine "." #field)
#define EQUAL(mine, theirs) static_assert(int(ours::mine) == int(theirs), #mine)

SAME_SIZE(Device, ibv_device);
SAME(Device, name, ibv_device, name);
SAME(Device, ibdev_path, ibv_device, ibdev_path);
SAME_SIZE(PortAttributes, ibv_port_attr);
SAME(PortAttributes, state, ibv_port_attr, state);
SAME(PortAttributes, active_mtu, ibv_port_attr, active_mtu);
SAME(PortAttributes, gid_count, ibv_port_attr, gid_tbl_len);
SAME(PortAttributes, lid, ibv_port_attr, lid);
SAME(PortAttributes, pkey_count, ibv_port_attr, pkey_tbl_len);
SAME(PortAttributes, link_layer, ibv_port_attr, link_layer);
SAME(PortAttributes, flags, ibv_port_attr, flags);
SAME_SIZE(Gid, ibv_gid);
SAME_SIZE(GidEntry, ibv_gid_entry);
SAME(GidEntry, gid, ibv_gid_entry, gid);
SAME(GidEntry, type, ibv_gid_entry, gid_type);
EQUAL(kRoceV1, IBV_GID_TYPE_ROCE_V1);
EQUAL(kRoceV2, IBV_GID_TYPE_ROCE_V2);
SAME_SIZE(Pd, ibv_pd);
SAME_SIZE(Mr, ibv_mr);
SAME(Mr, lkey, ibv_mr, lkey);
SAME(Mr, rkey, ibv_mr, rkey);
SAME_SIZE(Channel, ibv_comp_channel);
SAME(Channel, fd, ibv_comp_channel, fd);
SAME_SIZE(Cq, ibv_cq);
SAME_SIZE(Qp, ibv_qp);
SAME(Qp, context, ibv_qp, context);
SAME(Qp, number, ibv_qp, qp_num);
SAME_SIZE(QpInit, ibv_qp_init_attr);
SAME(QpInit, send_cq, ibv_qp_init_attr, send_cq);
SAME(QpInit, capacity, ibv_qp_init_attr, cap);
SAME(QpInit, type, ibv_qp_init_attr, qp_type);
SAME(QpInit, signal_all, ibv_qp_init_attr, sq_sig_all);
SAME(QpCapacity, max_inline, ibv_qp_cap, max_inline_data);
SAME_SIZE(Address, ibv_ah_attr);
SAME(Address, route, ibv_ah_attr, grh);
SAME(Address, dlid, ibv_ah_attr, dlid);
SAME(Address, sl, ibv_ah_attr, sl);
SAME(Address, is_global, ibv_ah_attr, is_global);
SAME(Address, port, ibv_ah_attr, port_num);
SAME(Route, dgid, ibv_global_route, dgid);
SAME(Route, sgid_index, ibv_global_route, sgid_index);
SAME(Route, hop_limit, ibv_global_route, hop_limit);
SAME(Route, traffic_class, ibv_global_route, traffic_class);
SAME_SIZE(QpAttributes, ibv_qp_attr);
SAME(QpAttributes, state, ibv_qp_attr, qp_state);
SAME(QpAttributes, path_mtu, ibv_qp_attr, path_mtu);
SAME(QpAttributes, rq_psn, ibv_qp_attr, rq_psn);
SAME(QpAttributes, sq_psn, ibv_qp_attr, sq_psn);
SAME(QpAttributes, destination_qp, ibv_qp_attr, dest_qp_num);
SAME(QpAttributes, access_flags, ibv_qp_attr, qp_access_flags);
SAME(QpAttributes, address, ibv_qp_attr, ah_attr);
SAME(QpAttributes, pkey_index, ibv_qp_attr, pkey_index);
SAME(QpAttributes, max_reads, ibv_qp_attr, max_rd_atomic);
SAME(QpAttributes, max_reads_here, ibv_qp_attr, max_dest_rd_atomic);
SAME(QpAttributes, min_rnr_timer, ibv_qp_attr, min_rnr_timer);
SAME(QpAttributes, port, ibv_qp_attr, port_num);
SAME(QpAttributes, timeout, ibv_qp_attr, timeout);
SAME(QpAttributes, retry_count, ibv_qp_attr, retry_cnt);
SAME(QpAttributes, rnr_retry, ibv_qp_attr, rnr_retry);
SAME_SIZE(Sge, ibv_sge);
SAME(Sge, lkey, ibv_sge, lkey);
SAME_SIZE(SendWr, ibv_send_wr);
SAME(SendWr, sges, ibv_send_wr, sg_list);
SAME(SendWr, opcode, ibv_send_wr, opcode);
SAME(SendWr, flags, ibv_send_wr, send_flags);
SAME(SendWr, immediate, ibv_send_wr, imm_data);
SAME(SendWr, remote.address, ibv_send_wr, wr.rdma.remote_addr);
SAME(SendWr, remote.rkey, ibv_send_wr, wr.rdma.rkey);
SAME_SIZE(ReceiveWr, ibv_recv_wr);
SAME_SIZE(Completion, ibv_wc);
SAME(Completion, status, ibv_wc, status);
SAME(Completion, opcode, ibv_wc, opcode);
SAME(Completion, bytes, ibv_wc, byte_len);
SAME(Completion, immediate, ibv_wc, imm_data);
SAME_SIZE(AsyncEvent, ibv_async_event);
SAME(AsyncEvent, type, ibv_async_event, event_type);
SAME_SIZE(ContextOps, ibv_context_ops);
SAME(ContextOps, poll_cq, ibv_context_ops, poll_cq);
SAME(ContextOps, request_notify, ibv_context_ops, req_notify_cq);
SAME(ContextOps, post_send, ibv_context_ops, post_send);
SAME(ContextOps, post_receive, ibv_context_ops, post_recv);
SAME_SIZE(Context, ibv_context);
SAME(Context, async_fd, ibv_context, async_fd);

EQUAL(kPortActive, IBV_PORT_ACTIVE);
EQUAL(kInfiniBand, IBV_LINK_LAYER_INFINIBAND);
EQUAL(kEthernet, IBV_LINK_LAYER_ETHERNET);
EQUAL(kGrhRequired, IBV_QPF_GRH_REQUIRED);
EQUAL(kLocalWrite, IBV_ACCESS_LOCAL_WRITE);
EQUAL(kRemoteWrite, IBV_ACCESS_REMOTE_WRITE);
EQUAL(kRc, IBV_QPT_RC);
EQUAL(kInit, IBV_QPS_INIT);
EQUAL(kReadyToReceive, IBV_QPS_RTR);
EQUAL(kReadyToSend, IBV_QPS_RTS);
EQUAL(kError, IBV_QPS_ERR);
EQUAL(kSignaled, IBV_SEND_SIGNALED);
EQUAL(kInline, IBV_SEND_INLINE);
EQUAL(kRdmaWriteWithImm, IBV_WR_RDMA_WRITE_WITH_IMM);
EQUAL(kReceived, IBV_WC_RECV);
EQUAL(kSuccess, IBV_WC_SUCCESS);
EQUAL(kRemoteFirst, IBV_WC_REM_INV_REQ_ERR);
EQUAL(kRemoteLast, IBV_WC_REM_OP_ERR);
EQUAL(kFlushed, IBV_WC_WR_FLUSH_ERR);
EQUAL(kRetryExceeded, IBV_WC_RETRY_EXC_ERR);
EQUAL(kRnrRetryExceeded, IBV_WC_RNR_RETRY_EXC_ERR);
EQUAL(kCqError, IBV_EVENT_CQ_ERR);
EQUAL(kQpFatal, IBV_EVENT_QP_FATAL);
EQUAL(kQpRequest, IBV_EVENT_QP_REQ_ERR);
EQUAL(kQpAccess, IBV_EVENT_QP_ACCESS_ERR);
EQUAL(kDeviceFatal, IBV_EVENT_DEVICE_FATAL);
EQUAL(kPortUp, IBV_EVENT_PORT_ACTIVE);
EQUAL(kPortDown, IBV_EVENT_PORT_ERR);
EQUAL(kState, IBV_QP_STATE);
EQUAL(kAccessFlags, IBV_QP_ACCESS_FLAGS);
EQUAL(kPkeyIndex, IBV_QP_PKEY_INDEX);
EQUAL(kPort, IBV_QP_PORT);
EQUAL(kAddress, IBV_QP_AV);
EQUAL(kPathMtu, IBV_QP_PATH_MTU);
EQUAL(kTimeout, IBV_QP_TIMEOUT);
EQUAL(kRetryCount, IBV_QP_RETRY_CNT);
EQUAL(kRnrRetry, IBV_QP_RNR_RETRY);
EQUAL(kRqPsn, IBV_QP_RQ_PSN);
EQUAL(kMaxReads, IBV_QP_MAX_QP_RD_ATOMIC);
EQUAL(kMinRnrTimer, IBV_QP_MIN_RNR_TIMER);
EQUAL(kSqPsn, IBV_QP_SQ_PSN);
EQUAL(kMaxReadsHere, IBV_QP_MAX_DEST_RD_ATOMIC);
EQUAL(kDestinationQp, IBV_QP_DEST_QPN);

int main() {}
