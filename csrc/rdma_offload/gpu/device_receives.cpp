// The half of DeviceMessages that receives.
#include "gpu/device_messages.h"

#include <utility>

namespace adaptra {

TransferRef DeviceMessages::receive(int rank, Tag tag, cuda::Address at, uint64_t bytes,
                                    cuda::Stream stream) {
  auto transfer = start(false, rank, tag, at, bytes, stream);
  if (!device_->soon([self = shared_from_this(), transfer] { self->post(transfer); })) {
    transfer->over = true;
    transfer->work->end(kClosed);
  }
  return transfer;
}

void DeviceMessages::post(const TransferRef& transfer) {
  open_.insert(transfer);
  if (refused(transfer)) return;
  if (auto idle = pinned_->take_idle(transfer->bytes)) return expect(transfer, std::move(idle));
  const auto pins = [self = shared_from_this(), transfer] {
    std::shared_ptr<uint8_t> block;
    Failure failed;
    try {
      block = self->pinned_->take(transfer->bytes);
    } catch (const CudaError& error) {
      failed = {error.what(), true};
    } catch (const std::exception& error) {
      failed = {error.what(), false};
    }
    const bool accepted = self->device_->soon([self, transfer, block, failed] {
      if (self->refused(transfer)) return;
      if (failed.why.empty()) return self->expect(transfer, block);
      if (failed.driver) self->broken(failed.why);
      self->end(transfer, failed.why);
      self->land(transfer);
    });
    if (!accepted) {
      transfer->over = true;
      transfer->work->end(kClosed);
    }
  };
  if (!device_->slowly(pins)) {
    end(transfer, kClosed);
    land(transfer);
  }
}

void DeviceMessages::expect(const TransferRef& transfer, std::shared_ptr<uint8_t> block) {
  guarded(transfer, [&] {
    transfer->block = std::move(block);
    transfer->inner =
        engine_.receive(transfer->rank, transfer->tag, transfer->block.get(), transfer->bytes);
    const auto arrived = [self = weak_from_this(), device = std::weak_ptr<Device>(device_),
                          transfer] {
      auto there = device.lock();
      if (!there) return;
      there->soon([self, transfer] {
        if (auto messages = self.lock()) messages->copy_in(transfer);
      });
    };
    if (!transfer->inner->then(arrived)) copy_in(transfer);
  });
}

void DeviceMessages::copy_in(const TransferRef& transfer) {
  if (transfer->work->done()) return;  // given up
  guarded(transfer, [&] {
    if (const auto error = transfer->inner->error(); !error.empty()) {
      end(transfer, error);
      return land(transfer);
    }
    const auto& there = transfer->inner->stamps;
    auto& stamps = transfer->work->stamps;
    stamps.sent = there.sent.load();
    stamps.completed = there.completed.load();
    issue(transfer, Device::kIn);
    follow(transfer, Device::kIn);
    transfer->work->end();
  });
}

void DeviceMessages::copied_in(const TransferRef& transfer) {
  land(transfer);
  count(transfer, copies[1]);
}

}  // namespace adaptra
