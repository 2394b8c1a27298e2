#include "phalanx/parallel/missing_gradients.h"

#include <fmt/format.h>

#include <algorithm>

namespace phalanx {

std::string quoted_list(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 10;
  std::string text;
  for (std::size_t i = 0; i < std::min(kShown, names.size()); ++i) {
    text += fmt::format("{}'{}'", i > 0 ? ", " : "", names[i]);
  }
  if (names.size() > kShown) text += fmt::format(" and {} more", names.size() - kShown);
  return text;
}

void abort_before_averaging(Communicator& comm, const char* who) noexcept {
  abort_with(comm,
             fmt::format("{}: the backward pass of rank {} ended with an error before its gradients were averaged", who,
                         comm.rank()));
}

void abort_with(Communicator& comm, const std::string& message) noexcept {
  if (comm.size() == 1) return;
  try {
    comm.abort(message);
  } catch (...) {
    // The communicator has already failed, which is all we wanted.
  }
}

}  // namespace phalanx
