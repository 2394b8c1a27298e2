// For tests: what each rank says, such as its error.
//
//   const auto errors = texts_of_ranks(2, [&](const auto& comm) { return error_text([&] { use(*comm); }); });
//   EXPECT_THAT(errors, Each(HasSubstr("rank 1 has died")));
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/communicator.h"

namespace phalanx {

/// What body(comm) returns, by rank. The ranks are threads of this process.
template <class Body>
std::vector<std::string> texts_of_ranks(int ranks, const Body& body) {
  std::vector<std::string> texts(static_cast<std::size_t>(ranks));
  run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& comm) {
    texts[static_cast<std::size_t>(comm->rank())] = body(comm);
  });
  return texts;
}

}  // namespace phalanx
