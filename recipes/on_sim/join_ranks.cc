// Recipes on simulated devices: rank r computes on sim:r, an asynchronous device, and data goes through pinned memory.
// A race between streams ends the program with status 3.
#include "recipes/join_ranks.h"

#include <fmt/format.h>

#include <cstdlib>

#include "phalanx/comm/device/staged_backend.h"
#include "phalanx/testing/sim_device/torch/sim_backend.h"
#include "phalanx/testing/sim_device/torch/sim_streams.h"

namespace recipe {
namespace {

namespace sim = phalanx::sim_device;

void end_if_raced() {
  const auto races = sim::sim_backend().runtime.races();
  for (const std::string& race : races) fmt::print(stderr, "{}\n", race);
  if (!races.empty()) std::_Exit(3);
}

/// What the context destroys last.
std::shared_ptr<void> checked_at_the_end(std::shared_ptr<void> host) {
  return {nullptr, [host = std::move(host)](void*) mutable {
            end_if_raced();
            host.reset();
          }};
}

}  // namespace

phalanx::ProcessContext join_ranks(const phalanx::InitOptions& options) {
  phalanx::InitOptions on_host = options;
  on_host.device = "cpu";
  phalanx::ProcessContext context = phalanx::init_from_environment(on_host);
  context.device = sim::sim_backend().device(context.local_rank);
  sim::current_device() = context.local_rank;
  context.world =
      std::make_shared<phalanx::Communicator>(phalanx::make_staged_backend(context.world->backend(), context.local_rank,
                                                                           sim::make_sim_streams(context.local_rank)),
                                              phalanx::CommunicatorOptions{});
  context.host = checked_at_the_end(std::move(context.host));
  return context;
}

}  // namespace recipe
