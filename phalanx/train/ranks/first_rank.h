// Runs work on one rank for all, or on each rank for itself, so that it ends the same way on every rank.
//
//   on_first_rank(*world, [&] { make_folder(); });               // collective
//   const std::string hash =
//       from_first_rank(*world, [&](const auto& still_working) { return hash_of(still_working); });
//   on_every_rank(world, [&] { tokens = open_my_files(); });     // collective
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "phalanx/comm/communicator.h"

namespace phalanx::train {

/// Collective. If `work` throws, every rank throws the same error; it is not reported as a lost peer.
void on_first_rank(Communicator& world, const std::function<void()>& work);

/// Collective. The same for work that may take longer than ranks wait for each other, and whose result all ranks get.
/// It calls `still_working` now and then; the other ranks go on waiting as long as it does.
std::string from_first_rank(Communicator& world,
                            const std::function<std::string(const std::function<void()>& still_working)>& work);

/// Collective. The same for work that every rank does and that sends nothing, for example opening files that may be
/// missing or damaged on one node. Where the ranks do not all have the same error, it names the rank. An exception that
/// is not one of Phalanx's (for example out of memory) is rethrown on the rank where it happened.
void on_every_rank(const std::shared_ptr<Communicator>& world, const std::function<void()>& work);

}  // namespace phalanx::train
