#include "phalanx/train/first_rank.h"

#include <exception>
#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/error_serialization.h"
#include "phalanx/checkpoint/rank_group.h"

namespace phalanx::train {

void on_first_rank(Communicator& world, const std::function<void()>& work) {
  std::exception_ptr failure;
  std::string note;
  if (world.rank() == 0) {
    try {
      work();
    } catch (const std::exception& error) {
      failure = std::current_exception();
      note = serialize_error(error);
    }
  }
  note = world.broadcast_bytes(note);
  if (failure) std::rethrow_exception(failure);
  if (!note.empty()) throw_serialized_error(note);
}

void on_every_rank(const std::shared_ptr<Communicator>& world, const std::function<void()>& work) {
  std::exception_ptr foreign;
  try {
    RankGroup(world).run_collectively([&] {
      try {
        work();
      } catch (const Error&) {
        throw;
      } catch (...) {
        foreign = std::current_exception();
        throw;
      }
      return std::string();
    });
  } catch (const Error&) {
    if (foreign) std::rethrow_exception(foreign);
    throw;
  }
}

}  // namespace phalanx::train
