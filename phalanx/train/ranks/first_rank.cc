#include "phalanx/train/ranks/first_rank.h"

#include <chrono>
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

std::string from_first_rank(Communicator& world,
                            const std::function<std::string(const std::function<void()>& still_working)>& work) {
  constexpr char kWorking = 'w', kDone = 'd', kFailed = 'f';
  constexpr std::chrono::milliseconds kBetweenSigns{250};
  if (world.rank() != 0) {
    while (true) {
      const std::string message = world.broadcast_bytes("");
      if (message.front() == kFailed) throw_serialized_error(message.substr(1));
      if (message.front() == kDone) return message.substr(1);
    }
  }
  bool are_ranks_lost = false;
  auto last_sign = std::chrono::steady_clock::now();
  const auto still_working = [&] {
    if (std::chrono::steady_clock::now() - last_sign < kBetweenSigns) return;
    are_ranks_lost = true;  // unless the next line returns
    world.broadcast_bytes(std::string(1, kWorking));
    are_ranks_lost = false;
    last_sign = std::chrono::steady_clock::now();
  };
  std::string message;
  std::exception_ptr failure;
  try {
    message = kDone + work(still_working);
  } catch (const std::exception& error) {
    if (are_ranks_lost) throw;
    failure = std::current_exception();
    message = kFailed + serialize_error(error);
  }
  world.broadcast_bytes(message);
  if (failure) std::rethrow_exception(failure);
  return message.substr(1);
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
