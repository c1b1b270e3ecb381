// NCCL: sends, receives and collectives, alone or in groups.
#include "memory.hpp"
#include "nccl_calls.hpp"
#include "options.hpp"
#include "runtime_state.hpp"

namespace fake_cuda {
namespace {

struct Posted {
  Communicator* communicator;
  Stream* stream;
  Item item;
};

thread_local int group_depth = 0;
thread_local std::vector<Posted> posted;
thread_local std::string last_words;

// What the streams of one group have done before it, and what they do after it, is ordered with it.
void order(Stream* first, Stream* second) {
  auto passing = std::make_shared<Passing>();
  launch(first, {Kind::record, "the beginning of a group of NCCL", 0, {}, passing});
  launch(second, {Kind::wait, "another stream of a group of NCCL", 0, {}, passing});
}

ncclResult_t submit() {
  std::vector<Posted> all;
  all.swap(posted);
  std::vector<Communicator*> communicators;
  for (const Posted& p : all) {
    bool seen = false;
    for (Communicator* c : communicators) seen |= c == p.communicator;
    if (!seen) communicators.push_back(p.communicator);
  }
  for (Communicator* c : communicators) {
    std::vector<Item> items;
    std::vector<Stream*> streams;
    for (const Posted& p : all) {
      if (p.communicator != c) continue;
      items.push_back(p.item);
      bool seen = false;
      for (Stream* s : streams) seen |= s == p.stream;
      if (!seen) streams.push_back(p.stream);
    }
    if (!c->connect(items)) return failed(ncclRemoteError, "a peer is gone, or this rank has aborted, while connecting");
    for (size_t i = 1; i < streams.size(); i++) order(streams[i], streams[0]);
    c->enqueue(streams[0], std::move(items));
    for (size_t i = 1; i < streams.size(); i++) order(streams[0], streams[i]);
  }
  return ncclSuccess;
}

ncclResult_t post(Communicator* c, void* stream, Item item) {
  if (!c) return failed(ncclInvalidArgument, "no communicator");
  if (c->wire.aborted) return failed(ncclInvalidUsage, "the communicator was aborted");
  Stream* s = runtime_stream(stream);
  if (!s) return failed(ncclInvalidArgument, "no such stream");
  if (item.peer >= c->wire.size || (item.peer < 0 && (item.call <= Call::receive || item.call == Call::broadcast || item.call == Call::reduce)))
    return failed(ncclInvalidArgument, "rank " + std::to_string(item.peer) + " of a communicator of " + std::to_string(c->wire.size));
  for (const void* p : {item.in, (const void*)item.out})
    if (p && item.count && where(p) == Where::pageable)
      return failed(ncclInvalidArgument, std::string(name_of(item.call)) + " was given memory of the host that is not pinned");
  const std::string more = "comm " + std::to_string(c->ordinal) + (item.peer < 0 ? "" : " peer " + std::to_string(item.peer));
  trace(name_of(item.call), s->ordinal, (long long)(item.count * width(item.type)), more.c_str());
  posted.push_back({c, s, item});
  return group_depth ? ncclSuccess : submit();
}

Reduction reduction_of(Communicator* c, int op) {
  if (op < ncclNumOps || !c) return {(ncclRedOp_t)op};
  const size_t own = (size_t)(op - ncclNumOps);
  return own < c->own_reductions.size() ? c->own_reductions[own] : Reduction{};
}

}  // namespace

ncclResult_t failed(ncclResult_t error, const std::string& why) {
  last_words = why;
  say("NCCL: %s", why.c_str());
  return error;
}

}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

const char* ncclGetLastError(Communicator*) { return last_words.c_str(); }

ncclResult_t ncclGroupStart() {
  trace("ncclGroupStart");
  group_depth++;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  trace("ncclGroupEnd");
  if (!group_depth) return failed(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  return --group_depth ? ncclSuccess : submit();
}

ncclResult_t ncclSend(const void* in, size_t count, ncclDataType_t type, int peer, Communicator* c, void* stream) {
  return post(c, stream, {Call::send, in, nullptr, count, type, {}, peer});
}

ncclResult_t ncclRecv(void* out, size_t count, ncclDataType_t type, int peer, Communicator* c, void* stream) {
  return post(c, stream, {Call::receive, nullptr, out, count, type, {}, peer});
}

ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, int op, Communicator* c, void* stream) {
  return post(c, stream, {Call::all_reduce, in, out, count, type, reduction_of(c, op)});
}

ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type, int op, int root, Communicator* c, void* stream) {
  return post(c, stream, {Call::reduce, in, out, count, type, reduction_of(c, op), root});
}

ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root, Communicator* c, void* stream) {
  return post(c, stream, {Call::broadcast, in, out, count, type, {}, root});
}

ncclResult_t ncclBcast(void* values, size_t count, ncclDataType_t type, int root, Communicator* c, void* stream) {
  return post(c, stream, {Call::broadcast, values, values, count, type, {}, root});
}

ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type, Communicator* c, void* stream) {
  return post(c, stream, {Call::all_gather, in, out, count, type});
}

ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type, int op, Communicator* c, void* stream) {
  return post(c, stream, {Call::reduce_scatter, in, out, count, type, reduction_of(c, op)});
}

ncclResult_t ncclAlltoAll(const void* in, void* out, size_t count, ncclDataType_t type, Communicator* c, void* stream) {
  return post(c, stream, {Call::all_to_all, in, out, count, type});
}

ncclResult_t ncclRedOpCreatePreMulSum(int* op, void* factor, ncclDataType_t type, int, Communicator* c) {
  double value = type == ncclFloat64 ? *(double*)factor : type == ncclFloat32 ? (double)*(float*)factor : 1;
  c->own_reductions.push_back({ncclSum, value});
  *op = (int)(ncclNumOps + c->own_reductions.size() - 1);
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(int, Communicator*) { return ncclSuccess; }

}  // extern "C"
