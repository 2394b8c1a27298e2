#include "phalanx/launch/rendezvous/security_line.h"

#include <fmt/format.h>

#include <array>
#include <string_view>
#include <utility>

namespace phalanx {
namespace {

// "shm+gloo" has the parts shm and gloo.
bool has_part(std::string_view backend, std::string_view part) {
  for (;;) {
    const std::size_t plus = backend.find('+');
    if (backend.substr(0, plus) == part) return true;
    if (plus == std::string_view::npos) return false;
    backend.remove_prefix(plus + 1);
  }
}

}  // namespace

std::string security_line(const JobGuards& guards) {
  std::string text = guards.secret_source.empty()
                         ? fmt::format("security: the store at {} lets in whoever reaches it", guards.store.text())
                         : fmt::format("security: the store at {} lets in only who knows the job secret (from {})",
                                       guards.store.text(), guards.secret_source);
  const auto uses = [&](std::string_view part) {
    return has_part(guards.backend, part) || has_part(guards.host_backend, part);
  };
  // With nccl+gloo and nccl+mpi the ranks of a node monitor each other through shared memory.
  if (uses("shm") || guards.backend.starts_with("nccl+")) text += "; shared memory is this user's only";
  if (uses("gloo")) text += "; gloo's data sockets let in only the job's ranks";
  constexpr std::array<std::pair<std::string_view, std::string_view>, 2> kWithSockets{
      {{"nccl", "NCCL's"}, {"mpi", "MPI's"}}};
  std::string owners;
  for (const auto& [part, owner] : kWithSockets)
    if (uses(part)) owners += fmt::format("{}{}", owners.empty() ? "" : " and ", owner);
  if (!owners.empty()) text += fmt::format("; {} data sockets take whoever reaches them", owners);
  return text + "; nothing is encrypted";
}

}  // namespace phalanx
