// A path over a connected socket, encrypted or not; who is at the other end has been proved before
// the socket comes here.
#pragma once

#include <deque>
#include <memory>
#include <mutex>

#include "core/loop.h"
#include "core/owned.h"
#include "core/path.h"
#include "tcp/decoder.h"
#include "tcp/tls.h"

namespace adaptra {

class TcpPath : public Path, public std::enable_shared_from_this<TcpPath> {
 public:
  // `fd`: a connected socket. `piece`: the longest payload, the same on both sides. `tls`: of `fd`, or none.
  TcpPath(Owned fd, int order, uint64_t piece, Loop& loop, std::weak_ptr<Sink> sink,
          std::unique_ptr<Tls> tls = nullptr);

  // From now on frames arrive.
  void start();

  bool takes() const override;
  uint64_t waiting() const override;
  Nanoseconds guess(uint64_t bytes) const override;
  void send(const Header& header, const uint8_t* payload, std::shared_ptr<void> keep) override;
  void flush() override;
  void close() override;
  void fail(const std::string& why) override { end(why); }

 private:
  struct Frame {
    Header header;
    const uint8_t* payload;
    std::shared_ptr<void> keep;
  };

  // On the loop's thread, without mutex_.
  void ready(uint32_t events);            // of epoll: read, write
  bool read_some(Sink& sink);             // use what one call gives; false: nothing more, or the end
  ssize_t recv(void* into, size_t most);  // as ::recv, decrypted
  void end(const std::string& why);       // close, and report to the sink

  // On any thread, with mutex_ held.
  void push();   // `write`, unless the socket is full; a broken one ends the path, soon
  bool write();  // what the socket takes; false when it is broken

  const Owned fd_;
  const std::unique_ptr<Tls> tls_;
  Loop& loop_;
  std::weak_ptr<Sink> sink_;

  mutable std::mutex mutex_;  // of what is to be sent
  std::deque<Frame> frames_;
  uint64_t gone_ = 0;     // bytes of the first frame
  uint64_t waiting_ = 0;  // bytes
  bool full_ = false, closed_ = false, watches_room_ = false;

  Decoder decoder_;  // of the loop's thread alone
};

}  // namespace adaptra
