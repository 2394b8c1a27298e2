#include "cli/sampling_arguments.h"

#include <algorithm>

#include "cli/parse_options.h"
#include "phalanx/base/error.h"

namespace phalanx::cli {

void add_sampling_options(CLI::App& app, SamplingArguments& parsed) {
  app.add_option("--max-new-tokens", parsed.max_new_tokens);
  app.add_option("--temperature", parsed.sampling.temperature)->each([&](const std::string&) {
    parsed.has_temperature = true;
  });
  app.add_option("--top-k", parsed.sampling.top_k);
  app.add_option("--top-p", parsed.sampling.top_p);
  app.add_option("--repetition-penalty", parsed.sampling.repetition_penalty);
  app.add_flag("--greedy", parsed.greedy);
  app.add_option("--seed", parsed.seed);
  add_repeated_option(app, "--stop", parsed.stops);
}

void check_sampling_options(SamplingArguments& parsed) {
  if (parsed.greedy && parsed.has_temperature && parsed.sampling.temperature != 0) {
    throw UsageError("--greedy and --temperature exclude each other");
  }
  if (std::ranges::any_of(parsed.stops, &std::string::empty)) throw UsageError("--stop is empty: expected a text");
  if (parsed.greedy) parsed.sampling.temperature = 0;
  require_range("--max-new-tokens", parsed.max_new_tokens, 1);
  require_range("--seed", parsed.seed, 0);
  parsed.sampling.seed = static_cast<std::uint64_t>(parsed.seed);
  parsed.sampling.validate();
}

}  // namespace phalanx::cli
