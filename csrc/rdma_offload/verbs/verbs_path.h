// A path over a queue pair of an RDMA device. Frames are written into slots that the receiver has
// granted: memory of its own, and of this connection alone. From there the payload is copied to its
// place, and the slot is given back.
//
// Slots bound what is under way. Over a long link those of the beginning are too few: a sender that has
// used all of them, and has seen a round trip carry half as much or more, asks for as many again.
//
// Beside it stays the TCP connection over which both have found each other: it ends with the process
// at the other end, which says over it why it gives the path up.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/loop.h"
#include "core/owned.h"
#include "core/path.h"
#include "core/speed.h"
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
  Nanoseconds due(uint64_t bytes) const override;
  void send(const Header& header, const uint8_t* payload, std::shared_ptr<void> keep) override;
  void flush() override;
  void close() override;
  void fail(const std::string& why) override { end(why); }

 private:
  struct Written {  // a slot that was, and is not given back yet
    uint32_t slot;
    uint64_t bytes;
    Speed::Sent sent;
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
  bool granted(const Header& header);  // more slots, or word that there are none; false: against the protocol
  void offer();                        // more slots to the peer
  void end(const std::string& why);     // close, and report to the peer and to the sink
  std::string words(int status) const;  // why a completion has failed

  // On any thread, with mutex_ held.
  bool given_back(uint32_t slots);  // the peer has read so many; false: more than were used
  void use(const VerbsSlots& slots);        // slots that the peer has granted
  void gather_frame(const Header& header);  // for the next write, which takes a slot
  bool has_room() const;
  Header* headers() const;          // where those of the next write stand until it is over
  void write_gathered();            // the frames that were gathered, or nothing: slots go back with either
  void give();                      // give slots back alone, where these are many and no frame goes
  // Put it behind those that `post` gives to the device; `payload`: bytes of it, which `keep` keeps.
  void write(Write& next, bool inlined, uint64_t payload, std::shared_ptr<void> keep);
  void drain();                     // let the last frame of this side get out
  void fail_soon(std::string why);  // `end` on the loop's thread; needs no lock
  // Both release `lock` while the device works.
  void hand_over(std::unique_lock<std::mutex>& lock);  // `post`, on the loop's thread if that is slow
  void post(std::unique_lock<std::mutex>& lock);       // all writes; one thread at a time does it

  Loop& loop_;
  const std::weak_ptr<Sink> sink_;
  const VerbsSizes sizes_;
  VerbsQp qp_;
  Owned socket_;

  mutable std::mutex mutex_;
  std::vector<VerbsSlots> theirs_;        // slots over there, counted over all of these:
  uint32_t slots_ = 0;                    // so many
  std::deque<uint32_t> open_;             // those that are free, in the order of their use
  std::deque<Written> written_;           // and those that are not
  Speed speed_;
  bool short_ = false;                    // all were used
  bool wants_ = false, asked_ = false;    // more slots: to ask for, and asked for or refused
  std::optional<Header> offer_;           // slots of this side, to be sent
  uint32_t slot_of_next_ = 0;             // where the next write goes
  uint32_t gathered_ = 0;                 // frames for it
  bool gathers_ = false;                  // while completions are looked at
  uint32_t free_ = 0;                     // slots here to give back: free, not yet reported
  uint64_t posted_ = 0, completed_ = 0;   // writes
  uint64_t signaled_ = 0;                 // of them, up to the last one that is reported when over
  uint64_t waiting_ = 0;                  // bytes of payload that have not been read there
  std::vector<Write> writes_;             // that the device has not got
  bool posts_ = false;                    // a thread gives it some, without the lock
  bool posts_soon_ = false;               // the loop's thread will
  std::condition_variable gave_;
  std::atomic<bool> slow_{false};         // it takes long to get them
  bool full_ = false, closed_ = false;
};

}  // namespace adaptra
