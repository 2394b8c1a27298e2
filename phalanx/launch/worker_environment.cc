#include "phalanx/launch/worker_environment.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <vector>

#include "phalanx/base/env.h"
#include "phalanx/base/error.h"

namespace phalanx {
namespace {

// Collects what is wrong with every variable, so that the user hears of all at once.
class VariableReader {
 public:
  explicit VariableReader(const EnvironmentLookup& lookup) : lookup_(lookup) {}

  std::optional<std::string> text(const std::string& name) const {
    auto value = lookup_(name);
    if (value && value->empty()) value.reset();
    return value;
  }
  std::string required_text(const std::string& name) {
    auto value = text(name);
    if (!value) missing_.push_back(name);
    return value.value_or("");
  }
  std::optional<int> integer(const std::string& name, int min, int max) {
    const auto value = text(name);
    if (!value) return std::nullopt;
    int number = 0;
    const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), number);
    if (error == std::errc{} && end == value->data() + value->size() && number >= min && number <= max) return number;
    malformed_.push_back(fmt::format("{} is '{}' (expected an integer from {} to {})", name, *value, min, max));
    return min;
  }
  int required_integer(const std::string& name, int min, int max) {
    const auto value = integer(name, min, max);
    if (!value) missing_.push_back(name);
    return value.value_or(min);
  }
  void complain(std::string what) { malformed_.push_back(std::move(what)); }

  void throw_if_wrong() const {
    if (missing_.empty() && malformed_.empty()) return;
    std::string text = "the worker environment is incomplete or wrong: ";
    if (!missing_.empty()) text += fmt::format("not set: {}", fmt::join(missing_, ", "));
    if (!malformed_.empty()) text += fmt::format("{}{}", missing_.empty() ? "" : "; ", fmt::join(malformed_, "; "));
    throw ConfigError(text +
                      ". Start the program with `phalanx launch` or torchrun, or unset RANK, WORLD_SIZE, "
                      "LOCAL_RANK and LOCAL_WORLD_SIZE to run a single process");
  }
  bool all_good() const { return missing_.empty() && malformed_.empty(); }

 private:
  const EnvironmentLookup& lookup_;
  std::vector<std::string> missing_, malformed_;
};

constexpr int kMaxWorld = 1 << 20;

}  // namespace

WorkerEnvironment read_worker_environment(const EnvironmentLookup& lookup_or_none) {
  const EnvironmentLookup lookup =
      lookup_or_none ? lookup_or_none : [](const std::string& name) { return env_string(name); };
  VariableReader reader(lookup);
  WorkerEnvironment result;
  const std::vector<std::string> marks{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PHALANX_STORE"};
  if (std::none_of(marks.begin(), marks.end(), [&](const auto& name) { return reader.text(name).has_value(); }))
    return result;

  result.world_size = reader.required_integer("WORLD_SIZE", 1, kMaxWorld);
  result.rank = reader.required_integer("RANK", 0, kMaxWorld - 1);
  const auto local_rank = reader.integer("LOCAL_RANK", 0, kMaxWorld - 1);
  const auto local_world_size = reader.integer("LOCAL_WORLD_SIZE", 1, kMaxWorld);
  if (local_rank.has_value() != local_world_size.has_value())
    reader.complain(local_rank ? "LOCAL_RANK is set and LOCAL_WORLD_SIZE is not"
                               : "LOCAL_WORLD_SIZE is set and LOCAL_RANK is not");
  result.local_rank = local_rank.value_or(result.rank);
  result.local_world_size = local_world_size.value_or(result.world_size);

  const auto store = reader.text("PHALANX_STORE");
  const std::string agent = reader.text("TORCHELASTIC_USE_AGENT_STORE").value_or("");
  if (store) {
    result.rendezvous = WorkerEnvironment::Rendezvous::launcher;
    try {
      result.store = parse_host_port(*store, "PHALANX_STORE");
    } catch (const ConfigError& error) {
      reader.complain(error.what());
    }
  } else {
    result.rendezvous = agent == "True" || agent == "true" || agent == "1"
                            ? WorkerEnvironment::Rendezvous::agent_store
                            : WorkerEnvironment::Rendezvous::static_master;
  }
  if (store || result.world_size == 1) {
    // Nobody is to be met at the master's address.
    result.master = {reader.text("MASTER_ADDR").value_or("127.0.0.1"),
                     static_cast<std::uint16_t>(reader.integer("MASTER_PORT", 0, 65535).value_or(0))};
    if (!store) result.rendezvous = WorkerEnvironment::Rendezvous::none;
  } else {
    result.master.host = reader.required_text("MASTER_ADDR");
    result.master.port = static_cast<std::uint16_t>(reader.required_integer("MASTER_PORT", 1, 65535));
  }
  result.run_id = reader.text("TORCHELASTIC_RUN_ID").value_or("");
  result.restart_count = reader.integer("TORCHELASTIC_RESTART_COUNT", 0, 1 << 30).value_or(0);
  if (reader.all_good()) {
    if (result.rank >= result.world_size)
      reader.complain(fmt::format("RANK is {} and WORLD_SIZE {} (ranks count from 0)", result.rank, result.world_size));
    if (result.local_rank >= result.local_world_size)
      reader.complain(fmt::format("LOCAL_RANK is {} and LOCAL_WORLD_SIZE {} (ranks count from 0)", result.local_rank,
                                  result.local_world_size));
    if (result.local_world_size > result.world_size)
      reader.complain(
          fmt::format("LOCAL_WORLD_SIZE is {} and WORLD_SIZE {}", result.local_world_size, result.world_size));
  }
  reader.throw_if_wrong();
  return result;
}

}  // namespace phalanx
