// A path that came back is on trial: it carries probes, as large as pieces of messages, and those
// themselves only if nothing else does. A link that loses what is large, or soon fails again, stays
// where it is.
#include "core/peer.h"

#include <algorithm>

namespace adaptra {

namespace {
constexpr uint64_t kProbes = 8;  // that end a trial; there is a tick between two of them
}

// One at a time; its answer says that all that went before it has come through, too.
void Peer::probe(Path& path) {
  if (path.order < kTrial || path.probed > path.answered || !path.takes()) return;
  Header header;
  header.kind = Kind::Probe;
  header.number = ++path.probed;
  header.length = static_cast<uint32_t>(std::min(kProbe, path.longest_piece));
  header.taken = reported_ = taken_;
  send_over(path, header, blank_.get(), blank_);
}

void Peer::answer(Path& path) {
  if (path.owed == 0 || !path.takes()) return;
  send_control(path, Kind::Probed, path.owed);
  path.owed = 0;
}

bool Peer::carried(Path& path, uint64_t number) {
  if (number != path.probed || number == path.answered) return false;
  path.answered = number;
  if (number == kProbes) path.order -= kTrial;
  return number == 1;
}

}  // namespace adaptra
