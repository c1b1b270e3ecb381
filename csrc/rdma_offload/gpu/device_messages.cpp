#include "gpu/device_messages.h"

#include <algorithm>
#include <cstring>
#include <utility>


namespace adaptra {

namespace {
constexpr Tag kNotice = 1ull << 31;  // tag of a notice of an error; those of messages have 31 bits
constexpr uint64_t kWords = 512;     // bytes of a notice, with a zero at its end
}  // namespace

std::shared_ptr<DeviceMessages> DeviceMessages::open(Engine& engine,
                                                     std::shared_ptr<Device> device,
                                                     std::shared_ptr<Pinned> pinned, Tag tag_space,
                                                     std::vector<int> peers, std::string name,
                                                     uint64_t piece) {
  if (piece == 0) throw std::invalid_argument("pieces of 0 bytes: a message would never be copied");
  std::shared_ptr<DeviceMessages> self(
      new DeviceMessages(engine, std::move(device), std::move(pinned), tag_space, std::move(peers),
                         std::move(name), piece));
  if (!self->device_->soon([self] { self->listen(); })) throw std::runtime_error("GPU is closed");
  return self;
}

DeviceMessages::DeviceMessages(Engine& engine, std::shared_ptr<Device> device,
                               std::shared_ptr<Pinned> pinned, Tag tag_space, std::vector<int> peers,
                               std::string name, uint64_t piece)
    : engine_(engine),
      device_(std::move(device)),
      pinned_(std::move(pinned)),
      tag_space_(tag_space),
      peers_(std::move(peers)),
      name_(std::move(name)),
      piece_(piece) {}

TransferRef DeviceMessages::start(bool sends, int rank, Tag tag, cuda::Address at, uint64_t bytes,
                                  cuda::Stream stream) {
  auto transfer = std::make_shared<Transfer>();
  transfer->rank = rank;
  transfer->tag = tag_space_ | tag;
  transfer->at = at;
  transfer->bytes = bytes;
  transfer->sends = sends;
  const std::weak_ptr<DeviceMessages> self = weak_from_this();
  const std::weak_ptr<Transfer> asked = transfer;
  transfer->work = std::make_shared<Work>([self, asked] {  // a caller waits: the engine asks the peer
    auto messages = self.lock();
    auto transfer = asked.lock();
    if (!messages || !transfer || !transfer->sends) return;
    messages->device_->soon([transfer] {
      transfer->asked = true;
      if (transfer->inner) transfer->inner->wait(0);
    });
  });
  Device::For messages(Use::Messages);
  if (device_->capturing(stream)) {
    throw CudaError("a message", cuda::kCaptureImplicit,
                    "its stream is being captured into a graph, which would send it never or "
                    "always; send it outside of the capture");
  }
  transfer->ready = device_->record(stream, sends);
  (sends ? transfer->work->stamps.sent : transfer->work->stamps.posted) = now();
  return transfer;
}

void DeviceMessages::join(const TransferRef& transfer, cuda::Stream stream) {
  Device::For messages(Use::Messages);
  if (transfer->copied) device_->wait(stream, transfer->copied);
}

bool DeviceMessages::on_thread(std::function<void()> job, double seconds) {
  struct Done {
    std::mutex mutex;
    std::condition_variable changed;
    bool over = false;
  };
  auto done = std::make_shared<Done>();
  const bool runs = device_->soon([job = std::move(job), done] {
    job();
    std::lock_guard<std::mutex> lock(done->mutex);
    done->over = true;
    done->changed.notify_all();
  });
  if (!runs) return true;  // the device has closed, and given up everything
  std::unique_lock<std::mutex> lock(done->mutex);
  return done->changed.wait_for(lock, patience(seconds), [&] { return done->over; });
}

bool DeviceMessages::abort(const TransferRef& transfer, double seconds) {
  const Nanoseconds begun = now();
  if (!on_thread([self = shared_from_this(), transfer] { self->give_up(transfer); }, seconds)) {
    return false;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  return landed_.wait_for(lock, patience(seconds - (now() - begun) * kNano),
                          [&] { return transfer->over.load(); });
}

bool DeviceMessages::close(double seconds) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(shut_, true)) return true;
  }
  auto under_way = std::make_shared<std::vector<TransferRef>>();
  const Nanoseconds begun = now();
  const bool done = on_thread(
      [self = shared_from_this(), under_way] {
        self->closed_ = true;
        under_way->assign(self->open_.begin(), self->open_.end());
        for (auto& transfer : *under_way) self->give_up(transfer);
        for (auto& [rank, notice] : self->notices_) self->engine_.abort(rank, notice.work);
        self->notices_.clear();
      },
      seconds);
  if (!done) return false;
  const auto left = [&] { return seconds - (now() - begun) * kNano; };
  {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool over = landed_.wait_for(lock, patience(left()), [&] {
      return std::all_of(under_way->begin(), under_way->end(),
                         [](const auto& transfer) { return transfer->over.load(); });
    });
    if (!over) return false;
  }
  return on_thread([] {}, left());  // the engine has what was copied last, and may end now
}

// Of nothing there is no copy, but its events keep their order. Pieces of a send stand one behind the
// other: each begins when that before it has passed.
void DeviceMessages::issue(const TransferRef& transfer, uint64_t until, Device::CopyStream on) {
  const auto stream = device_->stream(on);
  if (!transfer->copied) device_->wait(stream, transfer->ready);
  const bool behind = transfer->sends && transfer->copied;
  const EventRef begun = behind ? transfer->copied : device_->record(stream, true);
  const cuda::Address there = transfer->at + transfer->issued;
  uint8_t* const here = transfer->block.get() + transfer->issued;
  const uint64_t bytes = until - transfer->issued;
  if (bytes > 0 && transfer->sends) {
    device_->check(device_->cuda.copy_to_host(here, there, bytes, stream), "cuMemcpyDtoHAsync");
  } else if (bytes > 0) {
    device_->check(device_->cuda.copy_to_device(there, here, bytes, stream), "cuMemcpyHtoDAsync");
  }
  const EventRef passed = device_->record(stream, true);
  transfer->copies.push_back({begun, passed, until});
  transfer->copied = passed;
  transfer->issued = until;
}

// The memory of both sides belongs to the copies until they have passed, also if the message was
// given up.
void DeviceMessages::follow(const TransferRef& transfer, const EventRef& copied,
                            Device::CopyStream on) {
  device_->watch(on, copied, [self = shared_from_this(), transfer](const std::string& error) {
    self->copy_ended(transfer, error);
  });
}

void DeviceMessages::copy_ended(const TransferRef& transfer, const std::string& error) {
  const Transfer::Copy copy = std::move(transfer->copies.front());
  transfer->copies.pop_front();
  guarded(transfer, [&] {
    if (!error.empty()) {
      transfer->filling.reset();  // what comes behind it is not sent
      broken(error);
      end(transfer, error);
      return land_if_idle(transfer);
    }
    if (transfer->sends && transfer->passed == 0) stamp(transfer, copy);
    count(transfer, copy);
    transfer->passed = copy.until;
    land_if_idle(transfer);
    if (transfer->sends) copied_out(transfer);
  });
}

void DeviceMessages::count(const TransferRef& transfer, const Transfer::Copy& copy) {
  Copies& direction = copies[transfer->sends ? 0 : 1];
  direction.bytes += copy.until - transfer->passed;
  direction.nanoseconds += device_->elapsed(copy.begun, copy.passed) / kNano;
  if (copy.until == transfer->bytes) ++direction.count;
}

void DeviceMessages::guarded(const TransferRef& transfer, const std::function<void()>& work) {
  try {
    work();
  } catch (const CudaError& error) {
    broken(error.what());
    end(transfer, error.what());
    land_if_idle(transfer);
  } catch (const std::exception& error) {
    end(transfer, error.what());
    land_if_idle(transfer);
  }
}

std::string DeviceMessages::why_not(const TransferRef& transfer) const {
  if (closed_) return kClosed;
  if (!broken_.empty()) return broken_;
  const auto lost = lost_.find(transfer->rank);
  return lost == lost_.end() ? "" : lost->second;
}

bool DeviceMessages::refused(const TransferRef& transfer) {
  const auto why = why_not(transfer);
  if (why.empty() && !transfer->work->done()) return false;
  end(transfer, why);
  land_if_idle(transfer);
  return true;
}

void DeviceMessages::land_if_idle(const TransferRef& transfer) {
  if (transfer->slow) return;
  const bool more = transfer->issued < transfer->bytes && !transfer->work->done();
  if (transfer->copies.empty() && !more) land(transfer);
}

// The GPU is done with the memory of the message. What was copied from there is still to be sent.
void DeviceMessages::land(const TransferRef& transfer) {
  transfer->ready.reset();
  if (!transfer->sends || transfer->work->done()) transfer->block.reset();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    transfer->over = true;
    landed_.notify_all();
  }
  settle(transfer);
}

void DeviceMessages::end(const TransferRef& transfer, const std::string& why) {
  transfer->work->end(why);
  settle(transfer);
}

// What has ended may still be copied; what is copied may still have to be sent.
void DeviceMessages::settle(const TransferRef& transfer) {
  const bool sent = transfer->sends && transfer->inner;
  if (transfer->over && (sent || transfer->work->done())) open_.erase(transfer);
}

void DeviceMessages::give_up(const TransferRef& transfer) {
  if (transfer->work->done()) return;  // what is issued is waited for
  if (transfer->inner && transfer->sends) return;  // the engine has it, and gets the rest
  if (transfer->inner) engine_.abort(transfer->rank, transfer->inner);
  end(transfer, closed_ ? std::string("aborted: ") + kClosed : "aborted");
  transfer->on_copied = {};
  land_if_idle(transfer);
}

// Nothing more comes from a peer, nor is taken there.
void DeviceMessages::lose(int rank, const std::string& why) {
  lost_.emplace(rank, why);
  const auto all = open_;
  for (auto& transfer : all) {
    if (transfer->rank != rank || transfer->work->done()) continue;
    if (transfer->inner && !transfer->sends) engine_.abort(rank, transfer->inner);
    end(transfer, why);
    land_if_idle(transfer);
  }
}

// A GPU that has failed once is not used again: its peers are sent the reason.
void DeviceMessages::broken(const std::string& why) {
  if (!broken_.empty()) return;
  broken_ = why;
  std::string words = (name_ + " says: " + why).substr(0, kWords - 1);
  words.resize(kWords);
  for (int rank : peers_) {
    try {
      engine_.send(rank, tag_space_ | kNotice, reinterpret_cast<const uint8_t*>(words.data()), kWords);
    } catch (const std::exception&) {  // no memory is left: that peer learns of it by its timeout
    }
    lose(rank, why);
  }
}

void DeviceMessages::listen() {
  for (int rank : peers_) {
    Notice& notice = notices_[rank];
    notice.text.reset(new uint8_t[kWords]());
    notice.work = engine_.receive(rank, tag_space_ | kNotice, notice.text.get(), kWords);
    const auto come = [self = weak_from_this(), device = std::weak_ptr<Device>(device_), rank] {
      auto there = device.lock();
      if (!there) return;
      there->soon([self, rank] {
        if (auto messages = self.lock()) messages->notice_arrived(rank);
      });
    };
    if (!notice.work->then(come)) notice_arrived(rank);
  }
}

void DeviceMessages::notice_arrived(int rank) {
  auto notice = notices_.find(rank);
  if (notice == notices_.end() || !notice->second.work->error().empty()) return;
  notice->second.text[kWords - 1] = 0;
  lose(rank, reinterpret_cast<const char*>(notice->second.text.get()));
}

}  // namespace adaptra
