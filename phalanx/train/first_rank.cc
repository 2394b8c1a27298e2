#include "phalanx/train/first_rank.h"

#include <exception>
#include <string>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/rank_group.h"

namespace phalanx::train {

void on_first_rank(Communicator& world, const std::function<void()>& work) {
  std::exception_ptr failure;
  std::string message;
  if (world.rank() == 0) {
    try {
      work();
    } catch (const std::exception& error) {
      failure = std::current_exception();
      message = error.what();
    }
  }
  message = world.broadcast_bytes(message);
  if (failure) std::rethrow_exception(failure);
  if (!message.empty()) throw Error(message);
}

void on_every_rank(const std::shared_ptr<Communicator>& world, const std::function<void()>& work) {
  std::exception_ptr foreign;
  try {
    RankGroup(world).together([&] {
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
