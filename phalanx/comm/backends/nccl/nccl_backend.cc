#include "phalanx/comm/backends/nccl/nccl_backend.h"

#include <algorithm>
#include <exception>

#include "phalanx/base/error.h"

namespace phalanx {

NcclBackend::NcclBackend(Setup setup)
    : setup_(std::move(setup)), stream_(setup_.streams->make_stream()), window_(*setup_.control) {}

NcclBackend::~NcclBackend() = default;

std::unique_ptr<Operation> NcclBackend::start(const OperationDescription& description) {
  throw_if_aborted();
  if (!description.on_device) return setup_.control->start(description);
  return description.transfers.empty() ? make_nccl_collective(*this, description)
                                       : make_nccl_messages(*this, description);
}

std::shared_ptr<Backend> NcclBackend::split(const SplitRequest& request) {
  throw_if_aborted();
  Setup setup = setup_;
  // NCCL's split needs every rank, also one whose control backend could not be split.
  std::exception_ptr failure;
  try {
    setup.control = setup_.control->split(request);
  } catch (const CommError&) {
    failure = std::current_exception();
  }
  setup.names = request.names;
  const auto give_up = [this] { setup_.control->check_ranks(); };
  // The least rank identifies a group; ncclCommSplit orders by key.
  const int color = failure || request.members.empty()
                        ? kNcclNoColor
                        : *std::min_element(request.members.begin(), request.members.end());
  setup.group = setup_.group->split(color, std::max(request.rank, 0), give_up);
  if (failure) std::rethrow_exception(failure);
  if (!setup.group || !setup.control) return nullptr;
  return std::make_shared<NcclBackend>(std::move(setup));
}

std::shared_ptr<Backend> NcclBackend::split_host(const SplitRequest& request) {
  throw_if_aborted();
  return setup_.control->split_host(request);
}

void NcclBackend::abort(const std::string& reason) noexcept {
  if (!abort_.set(reason)) return;
  setup_.control->abort(reason);  // the other ranks hear of it there
  setup_.group->abort(reason);
}

}  // namespace phalanx
