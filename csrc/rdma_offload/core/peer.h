// Messages to and from one rank, over any number of paths.
//
// A message is cut into pieces, which go over all paths of the best order that work, or, where one of
// these is slow, each over the path on which it will be there first. It is kept
// until the other side has acknowledged all of it, and what a path that fails may have lost
// goes again over the others; what comes twice is dropped. So each message arrives exactly once.
//
// A message moves when it is sent, as far as there is credit: bytes that the other side will keep
// before a receive is posted. Beyond that a message asks, and waits for its own receive; others pass.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/path.h"
#include "core/ranges.h"
#include "core/work.h"

namespace adaptra {

using Memory = std::shared_ptr<uint8_t>;

// Word of a receive under way: after each `step` bytes or more, how many are there from the first on.
// Of the end there is none, which is the work's. `come` is called under the peer's lock: it may only
// pass the number on.
struct Progress {
  uint64_t step = UINT64_MAX;
  std::function<void(uint64_t here)> come;
};

class Peer : public Sink, public std::enable_shared_from_this<Peer> {
 public:
  // Why a path has failed, or nothing: one on trial has carried a probe. Called without locks of
  // the peer's.
  using Note = std::function<void(const Path* path, const std::string& what)>;

  // `window`: bytes of credit, the same on both sides. `blank`: kProbe bytes that all paths can send.
  Peer(std::string name, uint64_t window, Note note = {}, Memory blank = {});

  // Send `bytes` at `memory`, which stays as it is until the work ends. `sent`: when the message was
  // ready; 0 for now.
  WorkRef send(Tag tag, Memory memory, uint64_t bytes, Nanoseconds sent = 0);

  // The same for a message whose bytes are not there yet; `filled` says how many are, from the first
  // on, and `number` which message it is.
  WorkRef begin(Tag tag, Memory memory, uint64_t bytes, Nanoseconds sent, uint64_t* number);
  void filled(uint64_t number, uint64_t bytes);

  // Receive into `memory`, which has the size of the message, or has room for it if not `exact`.
  WorkRef receive(Tag tag, uint8_t* memory, uint64_t bytes, bool exact = true,
                  Progress progress = {});

  // Give a receive up: nothing is written to its memory after this. The message is dropped.
  void abort(const WorkRef& work);

  void add(std::shared_ptr<Path> path);

  // All that is under way fails, because of `why`; so does all that is asked later.
  void close(const std::string& why);

  // Send `alive` over paths that have sent nothing for `beat`, and fail those over which nothing has
  // come for `silence`; on the thread of the paths.
  void tick(Nanoseconds beat, Nanoseconds silence);

  struct Counts {
    uint64_t paths, trials, sent, received, bytes_sent, bytes_received, again, twice, kept;
  };
  Counts counts() const;

  ssize_t fill(const Header& header, uint64_t done,
               const std::function<ssize_t(uint8_t*)>& write) override;
  bool arrived(Path& path, const Header& header) override;
  void roomy(Path& path) override;
  void failed(Path& path, const std::string& why) override;

  const std::string name;

 private:
  struct Piece {
    uint64_t offset, length;
    Path* path;
  };
  struct Outgoing {
    uint64_t number, before, total, next = 0, filled = 0;
    Tag tag;
    bool asks = false, eager = true, soon = false, queued = false, started = false;
    Memory memory;
    std::vector<Piece> pieces;               // sent, and not acknowledged
    std::deque<std::pair<uint64_t, uint64_t>> again;  // offset, length
    WorkRef work;
  };
  struct Receive {
    uint8_t* memory;
    uint64_t bytes;
    bool exact;
    WorkRef work;
    Progress progress;
  };
  struct Incoming {
    uint64_t number, before, total, sent;
    Tag tag;
    bool eager = false, soon = false, asked = false, complete = false;
    Ranges here;
    uint64_t bytes = 0;
    uint64_t reach = 0;                 // up to where paths have written to its target
    uint64_t reported = 0;              // to its receive's progress
    uint8_t* target = nullptr;          // a receive's memory, or that of `own`
    std::unique_ptr<uint8_t[]> own;     // until a receive is posted, or to the end
    std::shared_ptr<Receive> receive;
    bool dropped = false;               // its receive was given up
    int writers = 0;                    // paths that write to its target, without the lock
    Nanoseconds completed = 0;
  };

  // These two lock mutex_ themselves.
  bool lost(Path& path);      // forget a failed path, and queue again what it may have lost; false: unknown
  void ask(uint64_t number);  // a caller waits for this send: have the peer acknowledge it soon

  // All others: with mutex_ held, on any thread that sends, receives or serves a path.

  // Paths on trial.
  void probe(Path& path);                     // send the next probe, unless one is unanswered
  void answer(Path& path);                    // answer the last probe that came
  bool carried(Path& path, uint64_t number);  // a probe was answered; true for the first one of a trial

  // Frames that go out.
  void pump();   // send what the paths take: acknowledgements, control frames, then pieces in turn
  void flush();  // what paths have kept back for more frames
  Path* best(uint64_t bytes) const;  // for a frame with so many at most; nullptr: wait until `roomy`
  uint64_t next_bytes() const;       // of the next message in turn
  void send_over(Path& path, const Header& header, const uint8_t* payload,
                 std::shared_ptr<void> keep);  // the only caller of Path::send
  void send_piece(Path& path, Outgoing& out);  // the next piece of a message that has_more
  void send_control(Path& path, Kind kind, uint64_t number);
  void send_haves(Path& path);                 // acknowledge as much as the path takes
  void enqueue(Kind kind, uint64_t number = 0);      // a control frame, for `pump`
  void acknowledge(uint64_t number, bool soon);      // with the next frame; `soon`: by the next `pump`
  static bool has_more(const Outgoing& out);         // to send now; an empty message has one piece
  void queue(Outgoing& out);                         // it takes its turn in `pump`, if it has_more
  void use_credit();                                 // start messages that wait for credit, in order
  static uint8_t flags(const Outgoing& out);         // as on the wire

  // Messages that come in.
  bool arrived_data(const Header& header);    // a piece is here; false: against the protocol
  bool wanted(const Header& header);          // whether a piece brings anything, and has room
  bool crowded() const;  // more messages are known than the peer may have under way or has credit for
  uint8_t* place(const Header& header);       // memory for a message: its receive's, or ours; or nullptr
  Incoming& incoming(const Header& header);   // the message's entry, made if it is new
  void match(Tag tag);                        // give messages of a tag to posted receives, in order
  bool first_of_tag(const Incoming& in) const;  // every earlier one of its tag is known
  void give(Incoming& in, std::shared_ptr<Receive> receive);  // the message fits it, or fails it
  void move(Incoming& in);             // what came before its receive: the rest goes straight there
  void report(Incoming& in);           // to its receive how far it is there, after each step
  void deliver_if_over(Incoming& in);  // once complete, and no path writes to it; may erase `in`
  void deliver(Incoming& in);          // end its receive, give credit back, erase `in`
  void drop(Incoming& in);             // no receive takes it any more

  // Ends; they release `lock` while they wait for paths that write.
  void leave(std::unique_lock<std::mutex>& lock);   // the peer has closed: fail what cannot end now
  void settle(std::unique_lock<std::mutex>& lock);  // until no path writes to memory of a message

  mutable std::mutex mutex_;
  std::condition_variable written_;  // a path has written what it was writing
  const uint64_t window_;
  const Note note_;
  const Memory blank_;
  std::string closed_;
  std::string left_;  // the other side has closed: what has come can still be received
  std::vector<std::shared_ptr<Path>> paths_;

  uint64_t last_ = 0;                  // number of the newest message
  uint64_t spent_ = 0, returned_ = 0;  // credit used, and given back by the other side, ever
  std::map<uint64_t, Outgoing> out_;   // by number
  struct OfTag {
    uint64_t last = 0, under_way = 0;
  };
  std::unordered_map<Tag, OfTag> of_tag_;  // of those in out_
  std::deque<uint64_t> ready_;         // with something to send; they take turns
  std::deque<uint64_t> asking_;        // those without credit, in order
  std::set<std::pair<Kind, uint64_t>> control_;  // control frames to send, each once
  Ranges haves_;               // messages to acknowledge, together with the next frame,
  bool soon_ = false;          // or, if set, by the next `pump`
  uint64_t more_haves_ = 0, have_bytes_ = 0;  // messages and bytes that have come since the last `have`
  bool unflushed_ = false;     // frames without payload were sent, and paths may hold them back

  std::map<uint64_t, Incoming> in_;  // by number: known, and not delivered
  std::unordered_map<Tag, std::deque<std::shared_ptr<Receive>>> posted_;  // without a message
  std::unordered_map<Tag, std::map<uint64_t, Incoming*>> unmatched_;      // without a receive, by number
  Ranges finished_;   // numbers of messages of which all has come
  uint64_t kept_ = 0;  // cost of messages that are in memory of ours for want of a receive
  uint64_t taken_ = 0, reported_ = 0;  // credit given back, ever; what of it the other side was sent
  Counts counts_{};
};

}  // namespace adaptra
