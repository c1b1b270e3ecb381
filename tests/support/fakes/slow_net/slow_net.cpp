// A network of NCCL between processes of one machine, whose links are as slow as a file says that
// network.py maps, too. Messages go through memory that both ends map. No thread: all happens in
// calls, which NCCL makes again and again.
//
// Eager, as sockets: what is sent leaves at once. Credit first, as InfiniBand: nothing leaves before
// the receive's credit has crossed the link, and a send is over when its acknowledgement is back.
// What was received is written where NCCL wants it when its time has come, and no earlier: a GPU may
// read it there without asking (protocol LL).

#include "net_abi.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>
#include <utility>

namespace slow_net {
namespace {

using Nanoseconds = int64_t;  // CLOCK_MONOTONIC, which all processes share

constexpr size_t kHosts = 16, kNameBytes = 48;
constexpr size_t kFrames = 1024;                // under way on one connection, at most
constexpr size_t kRequests = 64;                // of one end; NCCL has 32 at most
constexpr size_t kRoom = size_t{256} << 20;     // bytes under way on one connection, at most
constexpr size_t kLargest = size_t{64} << 20;   // bytes of a message
constexpr size_t kAligned = 64;
constexpr Nanoseconds kLookEvery = 1'000'000;   // between two looks at whether the peer lives
static_assert(std::atomic<double>::is_always_lock_free);

struct Link {
  std::atomic<double> delay;       // seconds
  std::atomic<double> rate;        // bytes per second; 0: any
  std::atomic<Nanoseconds> idle;   // when it has taken all that was sent
};

// The file `links`: network.py's _Links.
struct Links {
  uint32_t hosts;
  std::atomic<uint32_t> credit_first;
  char names[kHosts][kNameBytes];
  Link link[kHosts][kHosts];
};

struct Frame {
  uint64_t offset, bytes;
  int64_t tag;
  Nanoseconds asked, sent, arrived;
};

// What the ends of a connection share. Counts only grow; each is written by one end.
struct Wire {
  std::atomic<uint64_t> sent, posted, delivered;
  Frame frames[kFrames];
  Nanoseconds credits[kFrames];  // when that of each receive is at the sender
  char bytes[kRoom];
};

// A line of a log: network.py's Passed.
struct Passed {
  uint32_t source, target;
  uint64_t bytes;
  int64_t tag;
  Nanoseconds asked, sent, arrived, delivered;
};

struct Handle {
  uint32_t host, length;
  char name[kHandleBytes - 8];  // of a socket without a file: it begins with 0
};
static_assert(sizeof(Handle) == kHandleBytes);

struct End;

struct Request {
  bool used;
  End* end;
  uint64_t index;
  void* at;
  size_t bytes;
  Nanoseconds over;  // 0: not known yet
};

// One end of a connection. Its socket moves nothing; it closes when the other process has gone.
struct End {
  int socket = -1;
  uint32_t peer = 0;
  Wire* wire = nullptr;
  bool receives = false, gone = false;
  Nanoseconds looked = 0;
  Nanoseconds last = 0;   // the newest time at which something of ours is at the peer
  Nanoseconds asked = 0;  // when NCCL first wanted the next message sent; 0: not yet
  uint64_t head = 0;      // where the next message's bytes go
  Request requests[kRequests] = {};

  ~End() {
    if (wire != nullptr) munmap(wire, sizeof(Wire));
    if (socket >= 0) close(socket);
  }
};

struct Listener {
  int socket = -1, accepted = -1;
  ~Listener() {
    if (socket >= 0) close(socket);
    if (accepted >= 0) close(accepted);
  }
};

Log g_log = nullptr;
Links* g_links = nullptr;
uint32_t g_host = 0;
int g_passed = -1;  // the log of messages that have come here

Nanoseconds now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return Nanoseconds{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

Result failed(Result result, const std::string& why) {
  const std::string line = "adaptra slow network: " + why;
  if (g_log != nullptr) g_log(kWarning, ~0UL, __FILE__, __LINE__, "%s", line.c_str());
  return result;
}

Result failed_call(const char* call) {
  return failed(kSystemError, std::string(call) + ": " + std::strerror(errno));
}

Nanoseconds delay(uint32_t from, uint32_t to) {
  return std::llround(g_links->link[from][to].delay.load() * 1e9);
}

// When the last byte leaves, behind what others send over the link.
Nanoseconds leaves(uint32_t to, Nanoseconds when, size_t bytes) {
  Link& link = g_links->link[g_host][to];
  const double rate = link.rate.load();
  if (rate <= 0) return when;
  const Nanoseconds takes = std::llround(static_cast<double>(bytes) * 1e9 / rate);
  Nanoseconds idle = link.idle.load(), end;
  do {
    end = std::max(idle, when) + takes;
  } while (!link.idle.compare_exchange_weak(idle, end));
  return end;
}

// Whether the peer's process, or its end, is no more. Look before looking at what it has sent.
bool gone(End& end, Nanoseconds when) {
  if (!end.gone && when >= end.looked + kLookEvery) {
    end.looked = when;
    char byte;
    const ssize_t got = recv(end.socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    end.gone = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
  }
  return end.gone;
}

Result failed_peer(const End& end) {
  return failed(kRemoteError, std::string(g_links->names[end.peer]) + " is gone");
}

Request* new_request(End& end, uint64_t index, void* at, size_t bytes) {
  Request& request = end.requests[index % kRequests];
  if (request.used) return nullptr;
  request = {true, &end, index, at, bytes, 0};
  return &request;
}

// Where so many bytes fit beside those under way, which are one piece or two; kRoom: nowhere.
uint64_t place(const End& end, size_t bytes) {
  const uint64_t sent = end.wire->sent.load(), delivered = end.wire->delivered.load();
  if (sent == delivered) return 0;
  if (sent - delivered == kFrames) return kRoom;
  const uint64_t oldest = end.wire->frames[delivered % kFrames].offset;
  if (end.head <= oldest) return end.head + bytes <= oldest ? end.head : kRoom;
  if (end.head + bytes <= kRoom) return end.head;
  return bytes <= oldest ? 0 : kRoom;
}

Result init(Log log, void*) {
  g_log = log;
  if (g_links != nullptr) return kSuccess;
  const char *folder = std::getenv("ADAPTRA_SLOW_NET"), *name = std::getenv("NCCL_HOSTID");
  if (folder == nullptr || name == nullptr) {
    return failed(kInvalidUsage, "ADAPTRA_SLOW_NET and NCCL_HOSTID have to be set");
  }
  const int file = open((std::string(folder) + "/links").c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return failed_call("links");
  void* at = mmap(nullptr, sizeof(Links), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (at == MAP_FAILED) return failed_call("mmap of links");
  auto* links = static_cast<Links*>(at);
  for (g_host = 0; g_host < links->hosts; ++g_host) {
    if (std::strcmp(links->names[g_host], name) == 0) break;
  }
  if (g_host == links->hosts) return failed(kInvalidUsage, std::string("no host ") + name);
  const std::string passed = std::string(folder) + "/passed-" + std::to_string(getpid());
  g_passed = open(passed.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (g_passed < 0) return failed_call(passed.c_str());
  g_links = links;
  return kSuccess;
}

Result devices(int* count) {
  *count = 1;
  return kSuccess;
}

Result properties(int device, Properties* found) {
  *found = {};
  found->name = "slow0";
  found->memory = kHost;
  found->megabits = 100'000;
  found->most_connections = 65536;
  found->most_grouped_receives = 1;
  found->parts = 1;
  found->part[0] = device;
  found->largest_message = found->largest_of_collectives = kLargest;
  return kSuccess;
}

socklen_t address(const Handle& handle, sockaddr_un& into) {
  into = {};
  into.sun_family = AF_UNIX;
  const size_t length = std::min<size_t>(handle.length, sizeof into.sun_path);
  std::memcpy(into.sun_path, handle.name, length);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length);
}

int new_socket() { return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); }

Result listen(int, void* opaque, void** listener) {
  static std::atomic<int> count{0};
  Handle handle{};
  handle.host = g_host;
  handle.length = 1 + std::snprintf(handle.name + 1, sizeof handle.name - 1,
                                    "adaptra-slow-net-%d-%d-%llx", getpid(), ++count,
                                    static_cast<unsigned long long>(now()));
  auto made = std::make_unique<Listener>();
  made->socket = new_socket();
  sockaddr_un named;
  const socklen_t length = address(handle, named);
  if (made->socket < 0 || bind(made->socket, reinterpret_cast<sockaddr*>(&named), length) != 0 ||
      ::listen(made->socket, 64) != 0) {
    return failed_call("listening");
  }
  std::memcpy(opaque, &handle, sizeof handle);
  *listener = made.release();
  return kSuccess;
}

Result map(End& end, int memory) {
  void* at = mmap(nullptr, sizeof(Wire), PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
  if (at == MAP_FAILED) return failed_call("mmap");
  end.wire = static_cast<Wire*>(at);
  return kSuccess;
}

// The one message of a connection's socket: the number of the sender's host, with the memory.
struct Hello {
  uint32_t host = g_host;
  iovec part{&host, sizeof host};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{nullptr, 0, &part, 1, control, sizeof control, 0};
};

Result connect(int, void*, void* opaque, void** sending, void**) {
  *sending = nullptr;
  Handle handle;
  std::memcpy(&handle, opaque, sizeof handle);
  auto end = std::make_unique<End>();
  end->peer = handle.host;
  end->socket = new_socket();
  sockaddr_un named;
  const socklen_t length = address(handle, named);
  if (end->socket < 0 || ::connect(end->socket, reinterpret_cast<sockaddr*>(&named), length) != 0) {
    return errno == EAGAIN ? kSuccess : failed_call("connecting");
  }
  const int memory = memfd_create("adaptra-slow-net", MFD_CLOEXEC);
  if (memory < 0 || ftruncate(memory, sizeof(Wire)) != 0) return failed_call("memory");
  Result result = map(*end, memory);
  Hello hello;
  cmsghdr* carried = CMSG_FIRSTHDR(&hello.message);
  *carried = {CMSG_LEN(sizeof memory), SOL_SOCKET, SCM_RIGHTS};
  std::memcpy(CMSG_DATA(carried), &memory, sizeof memory);
  if (result == kSuccess && sendmsg(end->socket, &hello.message, MSG_NOSIGNAL) < 0) {
    result = failed_call("sendmsg");
  }
  close(memory);
  if (result == kSuccess) *sending = end.release();
  return result;
}

Result accept(void* opaque, void** receiving, void**) {
  *receiving = nullptr;
  auto& listener = *static_cast<Listener*>(opaque);
  if (listener.accepted < 0) {
    listener.accepted = accept4(listener.socket, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (listener.accepted < 0) return errno == EAGAIN ? kSuccess : failed_call("accept");
  }
  Hello hello;
  const ssize_t got = recvmsg(listener.accepted, &hello.message, MSG_CMSG_CLOEXEC);
  if (got < 0 && errno == EAGAIN) return kSuccess;
  cmsghdr* carried = got == sizeof hello.host ? CMSG_FIRSTHDR(&hello.message) : nullptr;
  if (carried == nullptr) return failed(kRemoteError, "who connected is gone");
  auto end = std::make_unique<End>();
  end->receives = true;
  end->peer = hello.host;
  end->socket = std::exchange(listener.accepted, -1);
  int memory;
  std::memcpy(&memory, CMSG_DATA(carried), sizeof memory);
  const Result result = map(*end, memory);
  close(memory);
  if (result == kSuccess) *receiving = end.release();
  return result;
}

Result register_memory(void*, void*, size_t, int memory, void** registered) {
  *registered = nullptr;
  return memory == kHost ? kSuccess : failed(kInvalidUsage, "memory of the host alone");
}

Result deregister_memory(void*, void*) { return kSuccess; }

Result send(void* opaque, void* from, size_t bytes, int tag, void*, void*, void** request) {
  *request = nullptr;
  auto& end = *static_cast<End*>(opaque);
  Wire& wire = *end.wire;
  const Nanoseconds sent = now();
  if (bytes > kLargest) return failed(kInvalidUsage, std::to_string(bytes) + " bytes at once");
  if (gone(end, sent)) return failed_peer(end);
  if (end.asked == 0) end.asked = sent;
  const uint64_t index = wire.sent.load();
  const bool credit_first = g_links->credit_first.load() != 0;
  if (credit_first) {
    if (index >= wire.posted.load() || sent < wire.credits[index % kFrames]) return kSuccess;
  }
  const size_t taken = std::max((bytes + kAligned - 1) / kAligned, size_t{1}) * kAligned;
  const uint64_t offset = place(end, taken);
  if (offset == kRoom) return kSuccess;
  Request* made = new_request(end, index, from, bytes);
  if (made == nullptr) return kSuccess;
  std::memcpy(wire.bytes + offset, from, bytes);
  end.last = std::max(end.last, leaves(end.peer, sent, bytes) + delay(g_host, end.peer));
  wire.frames[index % kFrames] = {offset, bytes, tag, end.asked, sent, end.last};
  end.head = offset + taken;
  end.asked = 0;
  made->over = credit_first ? end.last + delay(end.peer, g_host) : sent;
  wire.sent.store(index + 1);
  *request = made;
  return kSuccess;
}

Result receive(void* opaque, int count, void** into, size_t* bytes, int*, void**, void**,
               void** request) {
  *request = nullptr;
  auto& end = *static_cast<End*>(opaque);
  if (count != 1) return failed(kInvalidUsage, "several receives at once");
  const uint64_t index = end.wire->posted.load();
  Request* made = new_request(end, index, into[0], bytes[0]);
  if (made == nullptr) return kSuccess;
  end.last = std::max(end.last, now() + delay(g_host, end.peer));
  end.wire->credits[index % kFrames] = end.last;
  end.wire->posted.store(index + 1);
  *request = made;
  return kSuccess;
}

// Puts what has arrived where it was to be received, in order.
Result deliver(End& end, Nanoseconds when) {
  Wire& wire = *end.wire;
  const uint64_t known = std::min(wire.sent.load(), wire.posted.load());
  for (uint64_t index = wire.delivered.load(); index < known; ++index) {
    const Frame& frame = wire.frames[index % kFrames];
    if (when < frame.arrived) break;
    Request& request = end.requests[index % kRequests];
    if (frame.bytes > request.bytes) {
      return failed(kInvalidUsage, std::to_string(frame.bytes) + " bytes where " +
                                       std::to_string(request.bytes) + " were to be received");
    }
    std::memcpy(request.at, wire.bytes + frame.offset, frame.bytes);
    request.bytes = frame.bytes;
    request.over = now();
    const Passed line{end.peer,    g_host,     frame.bytes,   frame.tag,
                      frame.asked, frame.sent, frame.arrived, request.over};
    if (write(g_passed, &line, sizeof line) != sizeof line) return failed_call("the log");
    wire.delivered.store(index + 1);
  }
  return kSuccess;
}

Result flush(void*, int, void**, int*, void**, void** request) {
  *request = nullptr;  // nothing to be done: it is the host's memory
  return kSuccess;
}

Result test(void* opaque, int* done, int* bytes) {
  auto& request = *static_cast<Request*>(opaque);
  End& end = *request.end;
  *done = 0;
  const Nanoseconds when = now();
  const bool lost = gone(end, when);
  if (end.receives) {
    if (Result result = deliver(end, when); result != kSuccess) return result;
  }
  if (request.over == 0 || when < request.over) {
    // What the peer has sent before its end arrives all the same.
    const auto& moved = end.receives ? end.wire->sent : end.wire->delivered;
    return lost && moved.load() <= request.index ? failed_peer(end) : kSuccess;
  }
  *done = 1;
  if (bytes != nullptr) *bytes = static_cast<int>(request.bytes);
  request.used = false;
  return kSuccess;
}

template <typename Closed>
Result closed(void* opaque) {
  delete static_cast<Closed*>(opaque);
  return kSuccess;
}

}  // namespace
}  // namespace slow_net

extern "C" __attribute__((visibility("default"))) const slow_net::Net ncclNetPlugin_v10 = {
    "AdaptraSlow",
    slow_net::init,
    slow_net::devices,
    slow_net::properties,
    slow_net::listen,
    slow_net::connect,
    slow_net::accept,
    slow_net::register_memory,
    nullptr,
    slow_net::deregister_memory,
    slow_net::send,
    slow_net::receive,
    slow_net::flush,
    slow_net::test,
    slow_net::closed<slow_net::End>,
    slow_net::closed<slow_net::End>,
    slow_net::closed<slow_net::Listener>,
    nullptr,
    nullptr,
    nullptr,
};
