// Messages from and to a GPU's memory, through pinned memory of the host.
//
// A send: an event is recorded on its producer's stream; the copy to the host is issued on a stream of
// copies, which waits for that event; once the device's thread sees that the copy has passed, the
// engine sends. A receive: an event is recorded behind the last use of the target's memory; the bytes
// arrive in pinned memory; then the copy to the target is issued on another stream of copies, which
// waits for that event. The caller of either waits for nothing, and nothing on a stream waits for a
// message.
//
// A large message is copied in pieces, each with an event of its own, so that the copy out, the wire
// and the copy in take place at the same time. A send whose first piece the engine has is sent to its
// end, also where it is given up: its peer has no use for half of one.
//
// The memory of a message belongs to it until `over`: its owner keeps a reference, and neither
// writes to it nor frees it before. An error of the driver on one side is sent to all peers, whose
// messages to and from that side fail with its text.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "engine.h"
#include "gpu/pinned.h"

namespace adaptra {

struct Transfer;
using TransferRef = std::shared_ptr<Transfer>;
using OnCopied = std::function<void(const TransferRef&)>;

// A send or a receive under way.
struct Transfer {
  int rank = 0;           // of the peer
  Tag tag = 0;
  cuda::Address at = 0;   // of the message on the GPU: the source of a send, the target of a receive
  uint64_t bytes = 0;
  bool sends = false;
  OnCopied on_copied;  // of a send that waits for `release`: called once its copy is on the host

  // Of a send it ends when the peer has the message; of a receive when the copy to its target is
  // issued.
  WorkRef work;
  std::atomic<bool> over{false};  // the GPU neither reads nor writes the message's memory any more

  // Used by the device's thread alone. Two exceptions: anyone may use `copied` once `work` has ended,
  // and a send belongs to its caller until that thread has it.
  struct Copy {
    EventRef begun, passed;  // on the stream of copies
    uint64_t until;          // of the message's bytes
  };
  EventRef ready;           // on its caller's stream: the memory may be used
  EventRef copied;          // its last copy that is issued has passed
  std::deque<Copy> copies;  // issued, and not seen to have passed
  uint64_t issued = 0, passed = 0;  // bytes whose copy is; and is known to have
  std::shared_ptr<uint8_t> block;   // pinned memory
  WorkRef inner;                    // the engine's, from and to `block`
  std::shared_ptr<Engine::Filling> filling;  // of a send that the engine has, for what is still copied
  Nanoseconds left = 0;  // of a send: when its first piece had been copied
  bool slow = false;  // of a receive: another thread copies what is here, and uses the above
  bool asked = false;              // of a send: a caller waits, so the engine asks the peer to confirm it
};

class DeviceMessages : public std::enable_shared_from_this<DeviceMessages> {
 public:
  static constexpr uint64_t kPiece = 4 << 20;  // smaller ones gain little (docs/evidence/gpu.md)

  // `tag_space`: the upper bits of all tags here, whose own part has 31 bits. `peers`: ranks that the
  // engine has; it has to live until `close`. `name`: of this side, in errors at the others. `piece`:
  // bytes that are copied at a time, from 1 on; sides need not agree.
  static std::shared_ptr<DeviceMessages> open(Engine& engine, std::shared_ptr<Device> device,
                                              std::shared_ptr<Pinned> pinned, Tag tag_space,
                                              std::vector<int> peers, std::string name,
                                              uint64_t piece = kPiece);

  // Send, or receive, `bytes` at `at` of the GPU. `stream`: where these are produced, or where the
  // target was used last. They throw CudaError, and never wait. With `on_copied` the message is not
  // sent to the peer before `release`.
  TransferRef send(int rank, Tag tag, cuda::Address at, uint64_t bytes, cuda::Stream stream,
                   OnCopied on_copied = {});
  TransferRef receive(int rank, Tag tag, cuda::Address at, uint64_t bytes, cuda::Stream stream);
  void release(const TransferRef& transfer);

  // After this, what is put on `stream` sees the message of a receive, whose work has to have ended.
  void join(const TransferRef& transfer, cuda::Stream stream);

  // Give it up, and wait until neither the GPU nor the engine uses its memory any more. False if that
  // takes more than `seconds`, as where the GPU hangs.
  bool abort(const TransferRef& transfer, double seconds);

  // Give up all, as `abort` does.
  bool close(double seconds);

  struct Copies {  // by direction: from the GPU, to it; `count`: of whole messages
    std::atomic<uint64_t> count{0}, bytes{0}, nanoseconds{0};
  };
  Copies copies[2];

 private:
  DeviceMessages(Engine& engine, std::shared_ptr<Device> device, std::shared_ptr<Pinned> pinned,
                 Tag tag_space, std::vector<int> peers, std::string name, uint64_t piece);
  static constexpr const char* kClosed = "this side has closed the transport";
  struct Failure {
    std::string why;
    bool driver = false;  // it has failed: nothing more comes of its GPU
  };

  // On the caller's thread, without a lock.
  TransferRef start(bool sends, int rank, Tag tag, cuda::Address at, uint64_t bytes,
                    cuda::Stream stream);  // the transfer, with its event on `stream`
  bool on_thread(std::function<void()> job, double seconds);  // run it on the device's; false: not yet

  // Put the copy of what comes before `until` on its stream: out on the caller's thread, under
  // Device::in_order; in on the device's.
  void issue(const TransferRef& transfer, uint64_t until, Device::CopyStream on);

  // All others: on the device's thread, without a lock.

  // Sends: their copies are on the stream; one has passed; the engine takes the message, as far as
  // it is there.
  void follow_out(const TransferRef& transfer, const Failure& failed);
  void stamp(const TransferRef& transfer, const Transfer::Copy& first);
  void copied_out(const TransferRef& transfer);
  void hand_over(const TransferRef& transfer);

  // Receives: get pinned memory; the engine receives there; copy to the target what is `here`; the
  // rest of it.
  void post(const TransferRef& transfer);
  void expect(const TransferRef& transfer, std::shared_ptr<uint8_t> block);
  void copy_in(const TransferRef& transfer, uint64_t here);
  void copy_last(const TransferRef& transfer);
  void copy_slowly(const TransferRef& transfer);  // all of it, from memory that is not pinned

  // Both.
  void follow(const TransferRef& transfer, const EventRef& copied, Device::CopyStream on);
  void copy_ended(const TransferRef& transfer, const std::string& error);  // the first one under way
  void count(const TransferRef& transfer, const Transfer::Copy& copy);     // one that has passed
  void land_if_idle(const TransferRef& transfer);  // no copy is under way, and none will be
  void land(const TransferRef& transfer);    // the GPU is done with its memory; locks mutex_
  void end(const TransferRef& transfer, const std::string& why);  // its work
  void settle(const TransferRef& transfer);  // forget it once nothing of it is under way
  void give_up(const TransferRef& transfer);  // end it as aborted; a copy that is issued still passes

  // Failures.
  std::string why_not(const TransferRef& transfer) const;  // nothing can come of it; or empty
  bool refused(const TransferRef& transfer);         // end it if nothing can come of it
  void guarded(const TransferRef& transfer, const std::function<void()>& work);  // failing fails it
  void lose(int rank, const std::string& why);       // all that is under way with a peer
  void broken(const std::string& why);               // this GPU: all, and the peers are sent `why`
  void listen();                                     // receive such notices of all peers
  void notice_arrived(int rank);                     // lose what is under way with its sender

  Engine& engine_;
  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Pinned> pinned_;
  const Tag tag_space_;
  const std::vector<int> peers_;
  const std::string name_;
  const uint64_t piece_;

  // The device's thread alone.
  std::set<TransferRef> open_;
  struct Notice {
    std::unique_ptr<uint8_t[]> text;
    WorkRef work;
  };
  std::map<int, Notice> notices_;
  std::map<int, std::string> lost_;  // by rank: why nothing more comes from there
  std::string broken_;
  bool closed_ = false;

  std::mutex mutex_;
  std::condition_variable landed_;
  bool shut_ = false;  // no message is accepted any more
};

}  // namespace adaptra
