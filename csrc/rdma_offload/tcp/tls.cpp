#include "tcp/tls.h"

#include <dlfcn.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>

namespace adaptra {

namespace {

constexpr size_t kRecord = 16 << 10;      // bytes, the most that TLS encrypts as one
constexpr uint64_t kRekey = 32ull << 30;  // bytes; AES-GCM is good for some 400 GB with one key
constexpr long kTls13 = 0x0304;

// Of OpenSSL's headers: values that are part of its binary interface.
constexpr int kSetMinimum = 123, kSetMode = 33, kSetReadAhead = 41;     // of SSL_CTX_ctrl
constexpr long kPartialWrites = 1, kMovingBuffer = 2;
constexpr uint64_t kEndWithoutClose = 1u << 7;
constexpr int kVerifyPeer = 1;
constexpr int kWantRead = 2, kWantWrite = 3, kSystem = 5, kOver = 6;    // of SSL_get_error
constexpr int kSource = 0x0400;                                         // a kind of BIO
constexpr int kIsOver = 2, kFlush = 11;                                 // of a BIO's control
constexpr int kReads = 1, kWrites = 2, kRetry = 8, kEnd = 0x800;        // and of its flags

// What is used of the library, by its names there.
struct OpenSsl {
  std::string missing;
  void* context = nullptr;

  const void* (*TLS_method)();
  void* (*SSL_CTX_new)(const void*);
  long (*SSL_CTX_ctrl)(void*, int, long, void*);
  uint64_t (*SSL_CTX_set_options)(void*, uint64_t);
  int (*SSL_CTX_set_ciphersuites)(void*, const char*);
  int (*SSL_CTX_set_num_tickets)(void*, size_t);
  void (*SSL_CTX_set_psk_client_callback)(void*, unsigned (*)(void*, const char*, char*, unsigned,
                                                              unsigned char*, unsigned));
  void (*SSL_CTX_set_psk_server_callback)(void*, unsigned (*)(void*, const char*, unsigned char*,
                                                              unsigned));
  void* (*SSL_new)(void*);
  void (*SSL_free)(void*);
  void (*SSL_set_bio)(void*, void*, void*);
  int (*SSL_set_ex_data)(void*, int, void*);
  void* (*SSL_get_ex_data)(const void*, int);
  void (*SSL_set_verify)(void*, int, void*);
  void (*SSL_set_connect_state)(void*);
  void (*SSL_set_accept_state)(void*);
  int (*SSL_do_handshake)(void*);
  int (*SSL_session_reused)(const void*);
  int (*SSL_read_ex)(void*, void*, size_t, size_t*);
  int (*SSL_write_ex)(void*, const void*, size_t, size_t*);
  int (*SSL_get_error)(const void*, int);
  int (*SSL_has_pending)(const void*);
  int (*SSL_key_update)(void*, int);
  void (*ERR_clear_error)();
  int (*BIO_get_new_index)();
  void* (*BIO_meth_new)(int, const char*);
  int (*BIO_meth_set_write)(void*, int (*)(void*, const char*, int));
  int (*BIO_meth_set_read)(void*, int (*)(void*, char*, int));
  int (*BIO_meth_set_ctrl)(void*, long (*)(void*, int, long, void*));
  void* (*BIO_new)(const void*);
  void (*BIO_set_init)(void*, int);
  void (*BIO_set_data)(void*, void*);
  void* (*BIO_get_data)(void*);
  void (*BIO_set_flags)(void*, int);
  void (*BIO_clear_flags)(void*, int);
  int (*BIO_test_flags)(const void*, int);
  void* socket = nullptr;  // how it reads and writes

  OpenSsl();
};

const OpenSsl& openssl() {
  static const OpenSsl one;
  return one;
}

unsigned give_key(void* ssl, unsigned char* into, unsigned most) {
  const auto* key = static_cast<const std::string*>(openssl().SSL_get_ex_data(ssl, 0));
  if (key == nullptr || key->size() > most) return 0;
  std::memcpy(into, key->data(), key->size());
  return key->size();
}

unsigned first_key(void* ssl, const char*, char* identity, unsigned length, unsigned char* into,
                   unsigned most) {
  constexpr char kName[] = "adaptra";
  if (length < sizeof kName) return 0;
  std::memcpy(identity, kName, sizeof kName);
  return give_key(ssl, into, most);
}

unsigned second_key(void* ssl, const char*, unsigned char* into, unsigned most) {
  return give_key(ssl, into, most);
}

// OpenSSL's own socket raises SIGPIPE where the other side has gone, and blocks where its flags say.
int outcome_of(void* bio, ssize_t count, int way) {
  const OpenSsl& lib = openssl();
  lib.BIO_clear_flags(bio, kReads | kWrites | kRetry);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
    lib.BIO_set_flags(bio, way | kRetry);
  }
  return static_cast<int>(count);
}

int fd_of(void* bio) {
  return static_cast<int>(reinterpret_cast<intptr_t>(openssl().BIO_get_data(bio)));
}

int write_some(void* bio, const char* bytes, int count) {
  const ssize_t sent = ::send(fd_of(bio), bytes, count, MSG_DONTWAIT | MSG_NOSIGNAL);
  return outcome_of(bio, sent, kWrites);
}

int read_some(void* bio, char* into, int most) {
  const ssize_t got = ::recv(fd_of(bio), into, most, MSG_DONTWAIT);
  if (got == 0) openssl().BIO_set_flags(bio, kEnd);
  return outcome_of(bio, got, kReads);
}

long control(void* bio, int what, long, void*) {
  if (what == kIsOver) return openssl().BIO_test_flags(bio, kEnd) != 0;
  return what == kFlush;
}

OpenSsl::OpenSsl() {
  void* library = dlopen("libssl.so.3", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    missing = dlerror();
    return;
  }
  auto find = [&](auto& function, const char* name) {
    void* found = dlsym(library, name);
    if (found == nullptr) missing = std::string("libssl.so.3 has no ") + name;
    std::memcpy(&function, &found, sizeof found);
  };
#define FIND(name) find(name, #name)
  FIND(TLS_method);
  FIND(SSL_CTX_new);
  FIND(SSL_CTX_ctrl);
  FIND(SSL_CTX_set_options);
  FIND(SSL_CTX_set_ciphersuites);
  FIND(SSL_CTX_set_num_tickets);
  FIND(SSL_CTX_set_psk_client_callback);
  FIND(SSL_CTX_set_psk_server_callback);
  FIND(SSL_new);
  FIND(SSL_free);
  FIND(SSL_set_bio);
  FIND(SSL_set_ex_data);
  FIND(SSL_get_ex_data);
  FIND(SSL_set_verify);
  FIND(SSL_set_connect_state);
  FIND(SSL_set_accept_state);
  FIND(SSL_do_handshake);
  FIND(SSL_session_reused);
  FIND(SSL_read_ex);
  FIND(SSL_write_ex);
  FIND(SSL_get_error);
  FIND(SSL_has_pending);
  FIND(SSL_key_update);
  FIND(ERR_clear_error);
  FIND(BIO_get_new_index);
  FIND(BIO_meth_new);
  FIND(BIO_meth_set_write);
  FIND(BIO_meth_set_read);
  FIND(BIO_meth_set_ctrl);
  FIND(BIO_new);
  FIND(BIO_set_init);
  FIND(BIO_set_data);
  FIND(BIO_get_data);
  FIND(BIO_set_flags);
  FIND(BIO_clear_flags);
  FIND(BIO_test_flags);
#undef FIND
  if (!missing.empty()) return;
  context = SSL_CTX_new(TLS_method());
  if (context == nullptr || SSL_CTX_ctrl(context, kSetMinimum, kTls13, nullptr) != 1 ||
      SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") != 1) {
    missing = "libssl.so.3 has no TLS 1.3 with AES";
    return;
  }
  socket = BIO_meth_new(BIO_get_new_index() | kSource, "adaptra");
  if (socket == nullptr || BIO_meth_set_write(socket, write_some) != 1 ||
      BIO_meth_set_read(socket, read_some) != 1 || BIO_meth_set_ctrl(socket, control) != 1) {
    missing = "libssl.so.3 has no memory";
    return;
  }
  SSL_CTX_ctrl(context, kSetMode, kPartialWrites | kMovingBuffer, nullptr);
  SSL_CTX_ctrl(context, kSetReadAhead, 1, nullptr);
  SSL_CTX_set_options(context, kEndWithoutClose);  // whatever ends, its path has failed
  SSL_CTX_set_num_tickets(context, 0);
  SSL_CTX_set_psk_client_callback(context, first_key);
  SSL_CTX_set_psk_server_callback(context, second_key);
}

}  // namespace

std::string Tls::missing() { return openssl().missing; }

Tls::Tls(int fd, const std::string& key, bool first, double seconds) : key_(key) {
  using Clock = std::chrono::steady_clock;
  const OpenSsl& lib = openssl();
  if (!lib.missing.empty()) throw std::runtime_error("no encryption: " + lib.missing);
  ssl_ = lib.SSL_new(lib.context);
  void* bio = lib.BIO_new(lib.socket);
  if (ssl_ == nullptr || bio == nullptr) {
    lib.SSL_free(ssl_);
    throw std::runtime_error("no encryption: OpenSSL has no memory");
  }
  lib.BIO_set_data(bio, reinterpret_cast<void*>(static_cast<intptr_t>(fd)));
  lib.BIO_set_init(bio, 1);
  lib.SSL_set_bio(ssl_, bio, bio);  // which owns it from now on
  lib.SSL_set_ex_data(ssl_, 0, &key_);
  if (first) {
    lib.SSL_set_verify(ssl_, kVerifyPeer, nullptr);  // a certificate is no proof
    lib.SSL_set_connect_state(ssl_);
  } else {
    lib.SSL_set_accept_state(ssl_);
  }
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  std::string fault;
  for (;;) {
    lib.ERR_clear_error();
    const int result = lib.SSL_do_handshake(ssl_);
    if (result == 1) break;
    const int error = lib.SSL_get_error(ssl_, result);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
    if (error != kWantRead && error != kWantWrite) {
      fault = "the other side breaks off, or has another key";
    } else if (left <= 0) {
      fault = "the other side does not answer";
    }
    if (!fault.empty()) break;
    pollfd ready{fd, static_cast<short>(error == kWantRead ? POLLIN : POLLOUT), 0};
    ::poll(&ready, 1, static_cast<int>(left));
  }
  if (fault.empty() && lib.SSL_session_reused(ssl_) != 1) fault = "the key was not used";
  if (!fault.empty()) {
    lib.SSL_free(ssl_);
    throw std::runtime_error("encryption failed: " + fault);
  }
  record_.reserve(kRecord);
}

Tls::~Tls() { openssl().SSL_free(ssl_); }

ssize_t Tls::send(const msghdr& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (sent_ >= kRekey && openssl().SSL_key_update(ssl_, 0) == 1) sent_ = 0;
  ssize_t all = 0;
  size_t part = 0, done = 0;  // where the next record begins
  while (part < message.msg_iovlen) {
    record_.clear();
    while (part < message.msg_iovlen && record_.size() < kRecord) {
      const iovec& from = message.msg_iov[part];
      const auto* bytes = static_cast<const uint8_t*>(from.iov_base) + done;
      const size_t count = std::min(from.iov_len - done, kRecord - record_.size());
      record_.insert(record_.end(), bytes, bytes + count);
      done += count;
      if (done == from.iov_len) ++part, done = 0;
    }
    size_t sent = 0;
    openssl().ERR_clear_error();
    const int result = openssl().SSL_write_ex(ssl_, record_.data(), record_.size(), &sent);
    if (outcome(result, sent) <= 0) return all > 0 ? all : -1;
    all += sent;
    sent_ += sent;
    if (sent < record_.size()) break;
  }
  return all;
}

ssize_t Tls::recv(void* into, size_t most) {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t got = 0;
  openssl().ERR_clear_error();
  const int result = openssl().SSL_read_ex(ssl_, into, most, &got);
  return outcome(result, got);
}

bool Tls::pending() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return openssl().SSL_has_pending(ssl_) == 1;
}

ssize_t Tls::outcome(int result, size_t bytes) {
  if (result == 1) return static_cast<ssize_t>(bytes);
  const int error = openssl().SSL_get_error(ssl_, result);
  if (error == kOver) return 0;
  if (error == kWantRead || error == kWantWrite) {
    errno = EAGAIN;
  } else if (error != kSystem) {
    errno = kDamaged;
  } else if (errno == 0) {
    return 0;
  }
  return -1;
}

}  // namespace adaptra
