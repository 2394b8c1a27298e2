#include "phalanx/checkpoint/rank_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/verified_file.h"
#include "phalanx/comm/communicator.h"

namespace phalanx {
namespace {

// Notes that ranks exchange: what became of a piece of work.
constexpr char kDone = '+', kDamaged = '?', kFailed = '-', kConfig = 'c', kData = 'd';

std::string run_and_note(const std::function<std::string()>& work) {
  try {
    return kDone + work();
  } catch (const DamagedError& error) {
    return kDamaged + std::string(error.what());
  } catch (const ConfigError& error) {
    return kConfig + std::string(error.what());
  } catch (const DataError& error) {
    return kData + std::string(error.what());
  } catch (const std::exception& error) {  // whatever it is, the other ranks must hear of it
    return kFailed + std::string(error.what());
  }
}

[[noreturn]] void throw_as(char outcome, const std::string& message) {
  if (outcome == kDamaged) throw DamagedError(message);
  if (outcome == kConfig) throw ConfigError(message);
  if (outcome == kData) throw DataError(message);
  throw CheckpointError(message);
}

}  // namespace

RankGroup::RankGroup(std::shared_ptr<Communicator> comm) : comm_(std::move(comm)) {
  if (!comm_) return;
  rank_ = comm_->rank();
  size_ = comm_->size();
}

RankGroup RankGroup::split() const { return RankGroup(comm_ ? comm_->split(0, rank_, "checkpoint") : nullptr); }

std::vector<std::string> RankGroup::together(const std::function<std::string()>& work) const {
  if (size_ == 1) return {work()};
  auto notes = comm_->all_gather_bytes(run_and_note(work));
  const bool is_shared = std::ranges::all_of(notes, [&](const auto& note) { return note == notes[0]; });
  // What is wrong with the request itself comes before what is wrong with the files.
  for (const bool damaged : {false, true}) {
    for (int rank = 0; rank < size_; ++rank) {
      const auto& note = notes[static_cast<std::size_t>(rank)];
      if (note.front() == kDone || (note.front() == kDamaged) != damaged) continue;
      // Who it was says nothing where all say the same.
      throw_as(note.front(), is_shared ? note.substr(1) : fmt::format("rank {}: {}", rank, note.substr(1)));
    }
  }
  for (auto& note : notes) note.erase(0, 1);
  return notes;
}

}  // namespace phalanx
