// The half of DeviceMessages that sends.
#include "gpu/device_messages.h"

#include <algorithm>
#include <utility>

namespace adaptra {

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
    issue(transfer, Device::kOut);
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
  if (!failed.why.empty()) {
    if (failed.driver) broken(failed.why);
    end(transfer, failed.why);
    return land(transfer);
  }
  guarded(transfer, [&] {
    follow(transfer, Device::kOut);
    if (const auto why = why_not(transfer); !why.empty()) end(transfer, why);
  });
}

void DeviceMessages::copied_out(const TransferRef& transfer) {
  const Nanoseconds seen = now();
  if (transfer->work->done()) return land(transfer);  // given up
  auto& stamps = transfer->work->stamps;
  const auto when = [&](const EventRef& event) {
    const auto moment = device_->clock.host(*device_, event, seen);
    return moment ? static_cast<Nanoseconds>(moment->at) : seen;
  };
  transfer->left = when(transfer->copied);
  stamps.sent = std::min(when(transfer->ready), transfer->left);
  stamps.left = transfer->left;
  count(transfer, copies[0]);
  land(transfer);
  if (!transfer->on_copied) return hand_over(transfer);
  const auto on_copied = std::exchange(transfer->on_copied, {});
  on_copied(transfer);
}

// `sent` on the wire is when the message could leave: how long its copy took is not the link's.
void DeviceMessages::hand_over(const TransferRef& transfer) {
  if (closed_ || !transfer->block) return;
  guarded(transfer, [&] {
    transfer->inner = engine_.send(transfer->rank, transfer->tag, std::move(transfer->block),
                                   transfer->bytes, transfer->left);
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
