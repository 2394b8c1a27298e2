#include "phalanx/tensor/copy_stream.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace phalanx {

CopyStream::CopyStream(at::Device device) {
  if (device.is_cpu()) return;
  stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/false);
}

CopyStream::Mark CopyStream::run(const std::function<void()>& body) const {
  if (!stream_) {
    body();
    return nullptr;
  }
  const c10::impl::VirtualGuardImpl impl(stream_->device_type());
  c10::Event queued(stream_->device_type());
  queued.record(impl.getStream(stream_->device()));
  queued.block(*stream_);
  auto end = std::make_shared<c10::Event>(stream_->device_type());
  try {
    const c10::StreamGuard guard(*stream_);
    body();
  } catch (...) {
    end->record(*stream_);
    current_waits(end);
    throw;
  }
  end->record(*stream_);
  return end;
}

void CopyStream::keep_until_done(const at::Tensor& tensor) const {
  if (!stream_) return;
  const c10::impl::VirtualGuardImpl impl(stream_->device_type());
  impl.recordDataPtrOnStream(tensor.storage().data_ptr(), *stream_);
}

void CopyStream::synchronize() const {
  if (stream_) stream_->synchronize();
}

CopyStream::Mark CopyStream::mark_current(at::Device device) {
  if (device.is_cpu()) return nullptr;
  auto mark = std::make_shared<c10::Event>(device.type());
  mark->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return mark;
}

void CopyStream::current_waits(const Mark& mark) {
  if (!mark) return;
  const c10::impl::VirtualGuardImpl impl(mark->device_type());
  mark->block(impl.getStream(mark->device()));
}

void CopyStream::synchronize(const Mark& mark) {
  if (mark) mark->synchronize();
}

}  // namespace phalanx
