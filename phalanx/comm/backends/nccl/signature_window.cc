#include "phalanx/comm/backends/nccl/signature_window.h"

#include <algorithm>

namespace phalanx {

std::uint64_t SignatureWindow::add(const Signature& signature) {
  const std::lock_guard lock(mutex_);
  waiting_.push_back(signature);
  return added_++;
}

void SignatureWindow::begin() {
  mine_ = Contribution();
  {
    const std::lock_guard lock(mutex_);
    mine_.count = std::min<std::size_t>(waiting_.size(), kWindow);
    std::copy_n(waiting_.begin(), mine_.count, mine_.signatures.begin());
  }
  all_.assign(static_cast<std::size_t>(control_.size()), {});
  description_ = {};
  description_.verb = Verb::all_gather;
  description_.dtype = DataType::u8;
  // The exchanges of all ranks begin with the same operation. A rank that does something else on the host then gets an
  // error that names it.
  description_.stands_for = mine_.signatures.data();
  description_.input = &mine_;
  description_.input_count = sizeof(Contribution);
  description_.output = all_.data();
  description_.output_count = static_cast<std::int64_t>(sizeof(Contribution) * all_.size());
  operation_ = control_.start(description_);
}

void SignatureWindow::compare() {
  std::uint64_t common = kWindow;
  for (const Contribution& one : all_) common = std::min(common, one.count);
  std::vector<Signature> signatures(all_.size());
  for (std::uint64_t i = 0; i < common; ++i) {
    for (std::size_t rank = 0; rank < all_.size(); ++rank) signatures[rank] = all_[rank].signatures[i];
    require_equal_signatures(signatures);
  }
  const std::lock_guard lock(mutex_);
  waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(common));
  compared_ += common;
}

Progress SignatureWindow::advance(std::uint64_t ticket) {
  if (compared_ > ticket) return Progress::done;
  if (!operation_) begin();
  const Progress progress = operation_->advance();
  if (progress != Progress::done) return progress;
  operation_.reset();
  compare();
  return compared_ > ticket ? Progress::done : Progress::moved;
}

}  // namespace phalanx
