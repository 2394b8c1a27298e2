#include "phalanx/comm/backends/mpi/mpi_requests.h"

#include <algorithm>

namespace phalanx {

MPI_Request* MpiRequests::next() {
  requests_.push_back(mpi().request_null);
  return &requests_.back();
}

void MpiRequests::call(const char* name, int status) { check_mpi(status, name); }

std::byte* MpiRequests::bytes(std::size_t count) {
  // Not filled with zeros.
  memory_->bytes.emplace_back(new std::byte[std::max<std::size_t>(count, 1)]);
  return memory_->bytes.back().get();
}

const int* MpiRequests::ints(std::vector<int> values) {
  memory_->ints.push_back(std::make_unique<std::vector<int>>(std::move(values)));
  return memory_->ints.back()->data();
}

bool MpiRequests::are_done() {
  if (requests_.empty()) return true;
  if (requests_.size() == 1) {
    int flag = 0;
    check_mpi(mpi().test(requests_.data(), &flag, MPI_STATUS_IGNORE), "MPI_Test");
    if (flag != 0) requests_.clear();
    return flag != 0;
  }
  int flag = 0;
  statuses_.resize(requests_.size());
  const int status = mpi().testall(static_cast<int>(requests_.size()), requests_.data(), &flag, statuses_.data());
  if (status == MPI_ERR_IN_STATUS) {
    for (const MPI_Status& one : statuses_)
      if (one.MPI_ERROR != MPI_SUCCESS && one.MPI_ERROR != MPI_ERR_PENDING) check_mpi(one.MPI_ERROR, "MPI_Testall");
  }
  check_mpi(status, "MPI_Testall");
  if (flag != 0) requests_.clear();
  return flag != 0;
}

void MpiRequests::clear() {
  memory_->bytes.clear();
  memory_->ints.clear();
  memory_->others.clear();
}

void MpiRequests::leave() noexcept {
  std::erase(requests_, mpi().request_null);
  if (requests_.empty()) return;
  MpiProcess::get().leave(std::move(requests_), std::move(memory_));
  requests_.clear();
  memory_ = std::make_shared<Memory>();
}

MPI_Datatype mover_of(DataType type) {
  switch (element_size(type)) {
    case 8:
      return mpi().uint64;
    case 4:
      return mpi().uint32;
    case 2:
      return mpi().uint16;
    default:
      return mpi().uint8;
  }
}

}  // namespace phalanx
