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
    const auto soon = [self = weak_from_this(), device = std::weak_ptr<Device>(device_)](auto job) {
      auto there = device.lock();
      if (!there) return;
      there->soon([self, job] {
        if (auto messages = self.lock()) job(*messages);
      });
    };
    const auto come = [soon, transfer](uint64_t here) {
      soon([transfer, here](DeviceMessages& messages) { messages.copy_in(transfer, here); });
    };
    const Progress pieces{pinned_->pinned(transfer->block.get()) ? piece_ : UINT64_MAX, come};
    transfer->inner = engine_.receive(transfer->rank, transfer->tag, transfer->block.get(),
                                      transfer->bytes, true, pieces);
    const auto arrived = [soon, transfer] {
      soon([transfer](DeviceMessages& messages) { messages.copy_last(transfer); });
    };
    if (!transfer->inner->then(arrived)) copy_last(transfer);
  });
}

// The engine writes no more to what has come.
void DeviceMessages::copy_in(const TransferRef& transfer, uint64_t here) {
  if (transfer->work->done()) return;  // given up
  guarded(transfer, [&] {
    issue(transfer, here, Device::kIn);
    follow(transfer, transfer->copies.back().passed, Device::kIn);
  });
}

void DeviceMessages::copy_last(const TransferRef& transfer) {
  if (transfer->work->done()) return;  // given up
  guarded(transfer, [&] {
    if (const auto error = transfer->inner->error(); !error.empty()) {
      end(transfer, error);
      return land_if_idle(transfer);
    }
    const auto& there = transfer->inner->stamps;
    auto& stamps = transfer->work->stamps;
    stamps.sent = there.sent.load();
    stamps.completed = there.completed.load();
    if (!pinned_->pinned(transfer->block.get())) return copy_slowly(transfer);
    copy_in(transfer, transfer->bytes);
    transfer->work->end();
  });
}

// The driver copies memory that is not pinned within the call, which may wait for what the GPU was
// given before; other messages must not wait for that.
void DeviceMessages::copy_slowly(const TransferRef& transfer) {
  const auto copies = [self = shared_from_this(), transfer] {
    std::string failed;
    try {
      if (!transfer->work->done()) self->issue(transfer, transfer->bytes, Device::kIn);
    } catch (const CudaError& error) {
      failed = error.what();
    }
    const bool accepted = self->device_->soon([self, transfer, failed] {
      transfer->slow = false;
      if (!failed.empty()) {
        self->broken(failed);
        self->end(transfer, failed);
      }
      if (transfer->copies.empty()) return self->land_if_idle(transfer);  // or it was given up
      self->follow(transfer, transfer->copies.back().passed, Device::kIn);
      transfer->work->end();
    });
    if (!accepted) {
      transfer->over = true;
      transfer->work->end(kClosed);
    }
  };
  transfer->slow = true;
  if (device_->slowly(copies)) return;
  transfer->slow = false;
  end(transfer, kClosed);
  land_if_idle(transfer);
}

}  // namespace adaptra
