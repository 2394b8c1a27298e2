#include "phalanx/train/first_rank.h"

#include <exception>
#include <string>

#include "phalanx/base/error.h"

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

}  // namespace phalanx::train
