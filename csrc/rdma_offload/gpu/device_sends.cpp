// The half of DeviceMessages that sends.
#include "gpu/device_messages.h"

#include <algorithm>
#include <utility>

namespace adaptra {

namespace {
// Bytes of a message that the device's thread sends itself: it is earlier there, and nothing waits
// for long meanwhile.
constexpr uint64_t kAtOnce = 256 << 10;
}  // namespace

TransferRef DeviceMessages::send(int rank, Tag tag, cuda::Address at, uint64_t bytes,
                                 cuda::Stream stream, OnCopied on_copied) {
  auto transfer = start(true, rank, tag, at, bytes, stream);
  transfer->on_copied = std::move(on_copied);
  // The copy stands on the GPU before this returns. Put there later, it could stand behind a kernel
  // launched meanwhile that waits for a peer (a collective of the training's own), which with few
  // hardware queues holds it up, while the peer waits for this message.
  Device::For messages(Use::Messages);
  Failure failed;
  std::unique_lock<std::mutex> order;
  try {
    transfer->block = pinned_->take(bytes);
    order = device_->in_order();
    // What is held back until all of it is on the host needs no pieces.
    const uint64_t piece = transfer->on_copied ? bytes : std::min(piece_, bytes);
    do {
      issue(transfer, std::min(bytes, transfer->issued + piece), Device::kOut);
    } while (transfer->issued < bytes);
  } catch (const CudaError& error) {
    failed = {error.what(), true};
  } catch (const std::exception& error) {
    failed = {error.what(), false};
  }
  const bool accepted = device_->soon([self = shared_from_this(), transfer, failed] {
    self->follow_out(transfer, failed);
  });
  if (!accepted) {
    transfer->over = true;
    transfer->work->end(kClosed);
  }
  return transfer;
}

void DeviceMessages::release(const TransferRef& transfer) {
  device_->soon([self = shared_from_this(), transfer] {
    if (!transfer->work->done()) self->hand_over(transfer);
  });
}

// What is refused is copied all the same: its memory comes back when that has passed.
void DeviceMessages::follow_out(const TransferRef& transfer, const Failure& failed) {
  open_.insert(transfer);
  for (const auto& copy : transfer->copies) follow(transfer, copy.passed, Device::kOut);
  if (!failed.why.empty()) {
    if (failed.driver) broken(failed.why);
    end(transfer, failed.why);
    return land_if_idle(transfer);
  }
  if (const auto why = why_not(transfer); !why.empty()) end(transfer, why);
}

// It could leave when its first piece had been copied.
void DeviceMessages::stamp(const TransferRef& transfer, const Transfer::Copy& first) {
  const Nanoseconds seen = now();
  auto& stamps = transfer->work->stamps;
  const auto when = [&](const EventRef& event) {
    const auto moment = device_->clock.host(*device_, event, seen);
    return moment ? static_cast<Nanoseconds>(moment->at) : seen;
  };
  transfer->left = when(first.passed);
  stamps.sent = std::min(when(transfer->ready), transfer->left);
  stamps.left = transfer->left;
}

// What the engine has begun it gets to the end, whatever its caller wants by now.
void DeviceMessages::copied_out(const TransferRef& transfer) {
  if (transfer->inner) {
    if (transfer->filling) engine_.filled(transfer->filling, transfer->passed);
    return;
  }
  if (transfer->work->done()) return;  // given up
  if (!transfer->on_copied) return hand_over(transfer);
  const auto on_copied = std::exchange(transfer->on_copied, {});
  on_copied(transfer);
}

// `sent` on the wire is when the message could leave: how long its copy took is not the link's.
void DeviceMessages::hand_over(const TransferRef& transfer) {
  if (closed_ || !transfer->block) return;
  guarded(transfer, [&] {
    if (transfer->bytes <= kAtOnce && transfer->passed == transfer->bytes) {
      transfer->inner = engine_.send(transfer->rank, transfer->tag, std::move(transfer->block),
                                     transfer->bytes, transfer->left);
    } else {
      transfer->inner = engine_.begin(transfer->rank, transfer->tag, std::move(transfer->block),
                                      transfer->bytes, transfer->left, &transfer->filling);
      engine_.filled(transfer->filling, transfer->passed);
    }
    settle(transfer);
    const auto ended = [transfer, inner = std::weak_ptr<Work>(transfer->inner)] {
      auto work = inner.lock();
      if (!work) return;
      transfer->work->stamps.completed = work->stamps.completed.load();
      transfer->work->end(work->error());
    };
    if (!transfer->inner->then(ended)) return ended();
    if (transfer->asked) transfer->inner->wait(0);
  });
}

}  // namespace adaptra
