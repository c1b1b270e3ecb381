// NCCL: communicators made, split and given up.
#include <cstring>
#include <fcntl.h>
#include <unistd.h>

#include "memory.hpp"
#include "nccl_calls.hpp"
#include "options.hpp"
#include "runtime_state.hpp"

using namespace fake_cuda;

namespace {

constexpr int32_t note_split = 4;

std::mutex living_mutex;
int made = 0;
std::vector<std::shared_ptr<Communicator>>& living() {
  static auto* found = new std::vector<std::shared_ptr<Communicator>>;
  return *found;
}

ncclResult_t create(Communicator** out, int size, const std::string& id, int rank) {
  *out = nullptr;
  if (size < 1 || rank < 0 || rank >= size)
    return failed(ncclInvalidArgument, "rank " + std::to_string(rank) + " of " + std::to_string(size));
  auto c = std::make_shared<Communicator>();
  c->id = id;
  c->sends_to.assign((size_t)size, 0);
  c->receives_from.assign((size_t)size, 0);
  const int device = current_device();
  std::string fault;
  {
    HostWait waiting("ncclCommInitRank", "the " + std::to_string(size) + " ranks of the communicator, as rank " + std::to_string(rank));
    fault = c->wire.open(id, rank, size, device, nccl_seconds);
  }
  if (!fault.empty())
    return failed(ncclSystemError, "ncclCommInitRank as rank " + std::to_string(rank) + " of " + std::to_string(size) + ": " + fault);
  for (int p = 0; p < size; p++)
    if (p != rank && c->wire.peers[(size_t)p].device == device && c->wire.peers[(size_t)p].host == network().host) {
      c->wire.close();
      return failed(ncclInvalidUsage, "Duplicate GPU detected: ranks " + std::to_string(rank) + " and " + std::to_string(p) + " are both on device " +
                                          std::to_string(device));
    }
  Lock lock(living_mutex);
  c->ordinal = made++;
  living().push_back(c);
  c->start();
  *out = c.get();
  return ncclSuccess;
}

void forget(Communicator* c) {  // its thread keeps it until nothing is left to do
  Lock lock(living_mutex);
  for (auto i = living().begin(); i != living().end(); ++i)
    if (i->get() == c) {
      (*i)->stop();
      living().erase(i);
      return;
    }
}

std::shared_ptr<Communicator> keep(Communicator* c) {
  Lock lock(living_mutex);
  for (auto& found : living())
    if (found.get() == c) return found;
  return nullptr;
}

void traced(const char* call, Communicator* c) { trace(call, none, none, ("comm " + std::to_string(c->ordinal)).c_str()); }

ncclResult_t init_rank(Communicator** out, int size, const char* id, int rank) {
  trace("ncclCommInitRank", none, none, (std::to_string(rank) + " of " + std::to_string(size)).c_str());
  return create(out, size, std::string(id, strnlen(id, 40)), rank);
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* found) {
  *found = nccl_version;
  return ncclSuccess;
}

const char* ncclGetErrorString(int error) {
  static const char* const texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument",
                                      "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress"};
  return error >= 0 && error < 8 ? texts[error] : "unknown result code";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  unsigned char random[12];
  const int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
  const bool read_all = read(fd, random, sizeof random) == (ssize_t)sizeof random;
  close(fd);
  for (size_t i = 0; i < sizeof random; i++) snprintf(id->internal + 2 * i, 3, "%02x", random[i]);
  return read_all ? ncclSuccess : ncclSystemError;
}

ncclResult_t ncclCommInitRank(Communicator** out, int size, ncclUniqueId id, int rank) {
  return init_rank(out, size, id.internal, rank);
}

ncclResult_t ncclCommInitRankConfig(Communicator** out, int size, ncclUniqueId id, int rank, void*) {
  return init_rank(out, size, id.internal, rank);
}

ncclResult_t ncclCommInitRankScalable(Communicator** out, int size, int rank, int, ncclUniqueId* ids, void*) {
  return init_rank(out, size, ids->internal, rank);
}

ncclResult_t ncclCommSplit(Communicator* c, int color, int key, Communicator** out, void*) {
  traced("ncclCommSplit", c);
  *out = nullptr;
  const int serial = c->splits++;
  for (int p = 0; p < c->wire.size; p++)
    if (p != c->wire.rank) c->wire.send_note(p, {note_split, color, key, serial});
  int size = 1, rank = 0;
  for (int p = 0; p < c->wire.size; p++) {
    if (p == c->wire.rank) continue;
    HostWait waiting("ncclCommSplit", "rank " + std::to_string(p) + " of communicator " + std::to_string(c->ordinal));
    Note theirs{};
    if (!c->wire.receive_note(p, note_split, &theirs)) return failed(ncclRemoteError, "ncclCommSplit: rank " + std::to_string(p) + " is gone");
    if (theirs.a != color) continue;
    size++;
    if (theirs.b < key || (theirs.b == key && p < c->wire.rank)) rank++;
  }
  if (color < 0) return ncclSuccess;
  return create(out, size, c->id + "." + std::to_string(serial) + "." + std::to_string(color), rank);
}

ncclResult_t ncclCommFinalize(Communicator* c) {
  traced("ncclCommFinalize", c);
  c->drain("ncclCommFinalize");
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(Communicator* c) {
  auto kept = keep(c);
  if (!kept) return failed(ncclInvalidArgument, "ncclCommDestroy: no such communicator");
  traced("ncclCommDestroy", c);
  c->drain("ncclCommDestroy");
  forget(c);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(Communicator* c) {
  auto kept = keep(c);
  if (!kept) return failed(ncclInvalidArgument, "ncclCommAbort: no such communicator");
  traced("ncclCommAbort", c);
  c->abort();
  forget(c);
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(Communicator* c, ncclResult_t* error) {
  *error = c->wire.misused ? ncclInvalidUsage : c->wire.lost ? ncclRemoteError : ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const Communicator* c, int* count) {
  *count = c->wire.size;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const Communicator* c, int* rank) {
  *rank = c->wire.rank;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const Communicator* c, int* device) {
  *device = c->wire.device;
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(Communicator*, void*, size_t, void** handle) {
  *handle = (void*)1;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(Communicator*, void*) { return ncclSuccess; }

ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  return allocate(current_device(), bytes, pointer) == Result::done ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void* pointer) { return free_device(pointer) == Result::done ? ncclSuccess : ncclInvalidArgument; }

}  // extern "C"
