// A path over a queue pair of an RDMA device. Frames are written into slots that the receiver has
// granted: memory of its own, and of this connection alone. From there the payload is copied to its
// place, and the slot is given back.
//
// Beside it stays the TCP connection over which both have found each other: it ends with the process
// at the other end, which says over it why it gives the path up.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/loop.h"
#include "core/owned.h"
#include "core/path.h"
#include "verbs/verbs_qp.h"

namespace adaptra {

class VerbsPath : public Path, public std::enable_shared_from_this<VerbsPath> {
 public:
  // Payload of a frame, for messages cut into pieces of `piece`.
  static uint64_t longest(uint64_t piece);

  // Not connected; as for VerbsQp.
  VerbsPath(std::shared_ptr<VerbsDevice> device, int port, int gid, const VerbsChoice& which,
            VerbsService service, uint64_t piece, Loop& loop, std::weak_ptr<Sink> sink);

  std::string card() const { return qp_.card(); }
  void connect(const std::string& card);

  // Both sides are connected: serve it.
  void start(Owned socket);

  bool takes() const override;
  uint64_t waiting() const override;
  void send(const Header& header, const uint8_t* payload, std::shared_ptr<void> keep) override;
  void flush() override;
  void close() override;
  void fail(const std::string& why) override { end(why); }

 private:
  struct Written {
    uint64_t frame, bytes;
    std::shared_ptr<void> keep;
  };
  struct Write {
    ibv::SendWr wr{};
    ibv::Sge sges[3];
  };

  // On the loop's thread, without mutex_.
  void ready();           // the queue pair has completions
  bool room_again();      // whether the path takes frames, and did not
  void gather(bool yes);  // from now on frames without payload are gathered for one write, or written
  bool completed(Sink& sink, const ibv::Completion& completion);  // false: the path has ended
  bool received(Sink& sink, const ibv::Completion& completion);   // a write of the peer; as above
  void end(const std::string& why);     // close, and report to the peer and to the sink
  std::string words(int status) const;  // why a completion has failed

  // On any thread, with mutex_ held.
  bool given_back(uint32_t slots);  // the peer has read so many; false: more than were used
  bool has_room() const;
  Header* headers() const;          // where those of the next write stand until it is over
  void write_gathered();            // the frames that were gathered, or nothing: slots go back with either
  void give();                      // give slots back alone, where these are many and no frame goes
  void write(Write& next, bool inlined);  // put it behind those that `post` gives to the device
  void drain();                     // let the last frame of this side get out
  void fail_soon(std::string why);  // `end` on the loop's thread; needs no lock
  // Both release `lock` while the device works.
  void hand_over(std::unique_lock<std::mutex>& lock);  // `post`, on the loop's thread if that is slow
  void post(std::unique_lock<std::mutex>& lock);       // all writes; one thread at a time does it

  Loop& loop_;
  const std::weak_ptr<Sink> sink_;
  const uint64_t slot_;  // bytes
  VerbsQp qp_;
  Owned socket_;
  uint64_t received_ = 0;  // slots, on the loop's thread

  mutable std::mutex mutex_;
  uint64_t frames_ = 0;                   // slots that were written
  uint32_t gathered_ = 0;                 // frames for the next one
  bool gathers_ = false;                  // while completions are looked at
  uint32_t granted_ = 0;                  // slots over there that are free
  uint32_t free_ = 0;                     // slots here to give back: free, not yet reported
  uint64_t posted_ = 0, completed_ = 0;   // writes
  uint64_t signaled_ = 0;                 // of them, up to the last one that is reported when over
  std::deque<Written> written_;           // frames with payload that have not been read there
  uint64_t waiting_ = 0;
  std::vector<Write> writes_;             // that the device has not got
  bool posts_ = false;                    // a thread gives it some, without the lock
  bool posts_soon_ = false;               // the loop's thread will
  std::condition_variable gave_;
  std::atomic<bool> slow_{false};         // it takes long to get them
  bool full_ = false, closed_ = false;
};

}  // namespace adaptra
