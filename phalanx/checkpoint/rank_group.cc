#include "phalanx/checkpoint/rank_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <string_view>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/error_serialization.h"
#include "phalanx/checkpoint/files/verified_file.h"
#include "phalanx/comm/communicator.h"

namespace phalanx {
namespace {

// The first byte of the messages that ranks exchange: the outcome of a piece of work.
constexpr char kDone = '+', kDamaged = '?', kFailed = '-';

std::string run_and_note(const std::function<std::string()>& work) {
  try {
    return kDone + work();
  } catch (const DamagedError& error) {
    return kDamaged + serialize_error(error);
  } catch (const std::exception& error) {  // the other ranks must learn of any exception
    return kFailed + serialize_error(error);
  }
}

[[noreturn]] void throw_as(const std::string& note, const std::string& prefix) {
  const std::string_view error = std::string_view(note).substr(1);
  if (note.front() != kDamaged) throw_serialized_error(error, prefix);
  try {
    throw_serialized_error(error, prefix);
  } catch (const CheckpointError& damaged) {
    throw DamagedError(damaged.what());
  }
}

}  // namespace

RankGroup::RankGroup(std::shared_ptr<Communicator> comm) : comm_(std::move(comm)) {
  if (!comm_) return;
  rank_ = comm_->rank();
  size_ = comm_->size();
}

RankGroup RankGroup::split() const { return RankGroup(comm_ ? comm_->split(0, rank_, "checkpoint") : nullptr); }

std::vector<std::string> RankGroup::run_collectively(const std::function<std::string()>& work) const {
  if (size_ == 1) return {work()};
  auto notes = comm_->all_gather_bytes(run_and_note(work));
  const bool is_shared = std::ranges::all_of(notes, [&](const auto& note) { return note == notes[0]; });
  // An error in the request itself comes before damaged files.
  for (const bool damaged : {false, true}) {
    for (int rank = 0; rank < size_; ++rank) {
      const auto& note = notes[static_cast<std::size_t>(rank)];
      if (note.front() == kDone || (note.front() == kDamaged) != damaged) continue;
      // The rank is not named if all ranks have the same error.
      throw_as(note, is_shared ? "" : fmt::format("rank {}: ", rank));
    }
  }
  for (auto& note : notes) note.erase(0, 1);
  return notes;
}

}  // namespace phalanx
