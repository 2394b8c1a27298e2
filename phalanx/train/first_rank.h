// Work that one rank does for all, or each for itself, and that ends on all of them alike.
//
//   on_first_rank(*world, [&] { make_folder(); });               // collective
//   on_every_rank(world, [&] { tokens = open_my_files(); });     // collective
#pragma once

#include <functional>
#include <memory>

#include "phalanx/comm/communicator.h"

namespace phalanx::train {

/// What fails there is the same error on every rank, not a peer that was lost.
void on_first_rank(Communicator& world, const std::function<void()>& work);

/// The same for work that each rank does, and that sends nothing: files that are missing or damaged on one machine. The
/// error names the rank where not all have the same one. An exception that is none of Phalanx's (no memory) is rethrown
/// where it happened.
void on_every_rank(const std::shared_ptr<Communicator>& world, const std::function<void()>& work);

}  // namespace phalanx::train
