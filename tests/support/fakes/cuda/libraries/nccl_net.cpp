#include "nccl_net.hpp"

#include <algorithm>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <functional>
#include <unistd.h>

#include "options.hpp"

namespace fake_cuda {
namespace {

constexpr size_t most_requests = 32;  // of one end, as NCCL has
constexpr int warning = slow_net::kWarning, information = 3;

std::string machine_name() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

struct Log {
  int level = 0;
  int file = STDOUT_FILENO;
};

// NCCL_DEBUG and NCCL_DEBUG_FILE, in which %h is the host and %p the process.
Log* open_log() {
  auto* log = new Log;
  const char *level = getenv("NCCL_DEBUG"), *path = getenv("NCCL_DEBUG_FILE");
  const char* const levels[] = {"NONE", "VERSION", "WARN", "INFO", "ABORT", "TRACE"};
  for (int i = 0; level && i < 6; i++)
    if (strcasecmp(level, levels[i]) == 0) log->level = i;
  if (!path || log->level < warning) return log;
  std::string name;
  for (const char* c = path; *c; c++) {
    const bool escape = *c == '%' && c[1];
    if (escape) c++;
    name += escape && *c == 'h' ? machine_name() : escape && *c == 'p' ? std::to_string(getpid()) : std::string(1, *c);
  }
  const int file = open(name.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644);
  if (file >= 0) log->file = file;
  return log;
}

__attribute__((format(printf, 5, 6))) void write_log(int level, unsigned long, const char*, int, const char* format, ...) {
  static PerProcess<Log> log(open_log);
  if (level > log.get()->level) return;
  char text[1024];
  va_list given;
  va_start(given, format);
  vsnprintf(text, sizeof text, format, given);
  va_end(given);
  dprintf(log.get()->file, "%s:%d:%d [0] NCCL %s %s\n", machine_name().c_str(), getpid(), gettid(),
          level <= warning ? "WARN" : "INFO", text);
}

bool failed(slow_net::Result result) { return result != slow_net::kSuccess; }

Network* load() {
  const char *host = getenv("NCCL_HOSTID"), *path = getenv("NCCL_NET_PLUGIN"), *name = getenv("NCCL_NET");
  auto* found = new Network;
  found->host = std::hash<std::string>()(host ? host : machine_name());
  if (!path || strcmp(path, "none") == 0) return found;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  auto* net = library ? (const slow_net::Net*)dlsym(library, "ncclNetPlugin_v10") : nullptr;
  int devices = 0;
  slow_net::Properties properties{};
  std::string why;
  if (!net) {
    const char* error = dlerror();
    why = error ? error : "no ncclNetPlugin_v10";
  } else if (name && strcasecmp(name, net->name) != 0) {
    why = std::string("its network is ") + net->name;
  } else if (failed(net->init(write_log, nullptr)) || failed(net->devices(&devices)) || devices < 1 ||
             failed(net->properties(0, &properties)) || properties.largest_message < 1) {
    why = "it has no device";
  } else {
    write_log(information, 0, __FILE__, __LINE__, "Using network %s", net->name);
    found->plugin = net;
    found->largest = properties.largest_message;
    return found;
  }
  write_log(warning, 0, __FILE__, __LINE__, "NET/Plugin: %s: %s", path, why.c_str());
  if (name && strcasecmp(name, "Socket") != 0 && strcasecmp(name, "IB") != 0)
    found->fault = std::string("no network ") + name + ": " + path + ": " + why;
  return found;
}

}  // namespace

const Network& network() {
  static PerProcess<Network> found(load);
  return *found.get();
}

void NetQueue::post(char* at, size_t bytes) {
  static char nothing;
  do {
    const size_t size = std::min(bytes, network().largest);
    bytes -= size;
    pieces_.push_back({size ? at : &nothing, size, bytes == 0});
    at += size;
  } while (bytes);
}

bool NetQueue::start(Piece& piece) {
  const slow_net::Net& net = *network().plugin;
  if (!piece.registered && failed(net.register_memory(end, piece.at, std::max<size_t>(piece.bytes, 1), slow_net::kHost, &piece.registered)))
    return false;
  if (sends_) return !failed(net.send(end, piece.at, piece.bytes, tag_, piece.registered, nullptr, &piece.request));
  void* profiled = nullptr;
  return !failed(net.receive(end, 1, &piece.at, &piece.bytes, &tag_, &piece.registered, &profiled, &piece.request));
}

bool NetQueue::starting() const { return started_ < std::min(pieces_.size(), most_requests); }

bool NetQueue::move(bool test, size_t* over) {
  const slow_net::Net& net = *network().plugin;
  for (; starting(); started_++) {
    if (!start(pieces_[started_])) return false;
    if (!pieces_[started_].request) break;
  }
  while (test && started_) {
    const Piece& piece = pieces_.front();
    int done = 0, bytes = 0;
    if (failed(net.test(piece.request, &done, &bytes))) return false;
    if (!done) break;
    if (failed(net.deregister_memory(end, piece.registered))) return false;
    if (piece.last) (*over)++;
    pieces_.pop_front();
    started_--;
  }
  return true;
}

bool NetLink::listen(NetName* ours) { return !failed(network().plugin->listen(0, ours->bytes, &listener_)); }

bool NetLink::connect(NetName* theirs, bool* done) {
  const slow_net::Net& net = *network().plugin;
  int traffic_class = INT_MIN;  // none
  void* on_device = nullptr;
  auto made = [&](const char* way, int from, int to) {
    write_log(information, 0, __FILE__, __LINE__, "Channel 00/0 : %d[0] -> %d[0] [%s] via NET/%s/0", from, to, way, net.name);
  };
  if (!sending.end) {
    if (failed(net.connect(0, &traffic_class, theirs->bytes, &sending.end, &on_device))) return false;
    if (sending.end) made("send", rank_, peer_);
  }
  if (!receiving.end) {
    if (failed(net.accept(listener_, &receiving.end, &on_device))) return false;
    if (receiving.end) made("receive", peer_, rank_);
  }
  *done = sending.end && receiving.end;
  return true;
}

NetLink::~NetLink() {
  const slow_net::Net& net = *network().plugin;
  if (sending.end) net.close_sending(sending.end);
  if (receiving.end) net.close_receiving(receiving.end);
  if (listener_) net.close_listener(listener_);
}

}  // namespace fake_cuda
