// Encryption of a connection: TLS 1.3 by OpenSSL, which is opened when it is asked for. Both sides
// prove, and derive their keys from, one secret of this connection alone; there are no certificates.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace adaptra {

class Tls {
 public:
  // Why there is none here, or empty.
  static std::string missing();

  // What `errno` is where a record was changed on its way here, or the other side says that one was.
  static constexpr int kDamaged = EBADMSG;

  // Shake hands over `fd`, which stays the caller's. `key`: 32 bytes, the same on both sides.
  // `first`: one side is. Throws std::runtime_error after `seconds`, or if the other side has another
  // key.
  Tls(int fd, const std::string& key, bool first, double seconds);
  ~Tls();

  // As ::sendmsg and ::recv of a socket that does not block. What could not be sent comes again.
  ssize_t send(const msghdr& message);
  ssize_t recv(void* into, size_t most);

  // Whether decrypted bytes may wait here, for which the socket does not become readable.
  bool pending() const;

 private:
  ssize_t outcome(int result, size_t bytes);  // of a call of OpenSSL, as ::send; with mutex_ held

  mutable std::mutex mutex_;  // a connection of OpenSSL is one thread's at a time
  void* ssl_ = nullptr;
  std::string key_;
  std::vector<uint8_t> record_;  // what goes out at once
  uint64_t sent_ = 0;            // bytes, with the key of now
};

}  // namespace adaptra
