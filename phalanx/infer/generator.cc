#include "phalanx/infer/generator.h"

#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <list>
#include <numeric>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/base/human.h"
#include "phalanx/infer/scheduler.h"
#include "phalanx/infer/stage_runner.h"
#include "phalanx/models/llama.h"
#include "phalanx/nn/evaluation_mode.h"

namespace phalanx::infer {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

std::string_view name_of(FinishReason reason) {
  switch (reason) {
    case FinishReason::stop_token:
      return "stop_token";
    case FinishReason::stop_string:
      return "stop_string";
    case FinishReason::max_new_tokens:
      return "max_new_tokens";
    case FinishReason::max_seq_len:
      return "max_seq_len";
  }
  return "";
}

Generator::Generator(models::Llama& model, GeneratorOptions options)
    : model_(model), options_(std::move(options)), runner_(std::make_unique<StageRunner>(model, options_.stages)) {
  if (options_.max_batch < 1 || options_.prefill_chunk < 1 || options_.cache_bytes < 0) {
    throw ConfigError(
        fmt::format("generation: max_batch is {}, prefill_chunk {} and cache_bytes {}: expected 1, 1 and 0 "
                    "or more",
                    options_.max_batch, options_.prefill_chunk, options_.cache_bytes));
  }
  if (!options_.stages && !model.part().is_whole(model.config())) {
    throw ConfigError(fmt::format("generation: the model is a part ({}): expected the communicator of all its stages",
                                  model.part().text()));
  }
  options_.prefill_chunk = std::min(options_.prefill_chunk, model_.config().max_seq_len);
  // With such a scaling the rotation of all positions of a prompt depends on its whole length.
  if (model_.config().rope_scaling.depends_on_length()) options_.prefill_chunk = model_.config().max_seq_len;
}

Generator::~Generator() = default;

std::string Generator::fault_of(const Request& request) const {
  const auto& config = model_.config();
  try {
    request.sampling.validate();
  } catch (const ConfigError& error) {
    return error.what();
  }
  if (request.prompt.empty()) return "it has no tokens";
  if (std::ssize(request.prompt) >= config.max_seq_len) {
    return fmt::format("it has {} tokens; the model's max_seq_len of {} leaves room for at most {} and one new token",
                       request.prompt.size(), config.max_seq_len, config.max_seq_len - 1);
  }
  if (request.max_new_tokens < 1) {
    return fmt::format("max_new_tokens is {}: expected 1 or more", request.max_new_tokens);
  }
  if (!request.stop_strings.empty() && options_.tokenizer == nullptr) {
    return "it has stop strings, but there is no tokenizer that would make text of tokens";
  }
  for (const auto token : request.prompt) {
    if (token >= 0 && token < config.vocab_size) continue;
    return fmt::format("token {} is not in the model's vocabulary of {}: is it another model's tokenizer?", token,
                       config.vocab_size);
  }
  return "";
}

std::int64_t Generator::positions_of(const Request& request) const {
  return std::min(model_.config().max_seq_len, std::ssize(request.prompt) + request.max_new_tokens);
}

std::vector<Completion> Generator::generate(const std::vector<Request>& requests, const OnToken& on_token) {
  std::int64_t longest = 1;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (const auto fault = fault_of(requests[i]); !fault.empty()) {
      throw Error(fmt::format("{}: {}", place_of(requests[i], i), fault));
    }
    longest = std::max(longest, positions_of(requests[i]));
  }
  std::vector<std::size_t> order(requests.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater(), [&](std::size_t i) { return requests[i].prompt.size(); });
  std::vector<Completion> completions(requests.size());
  std::size_t taken = 0;
  RequestStream stream{.next =
                           [&](std::int64_t count) {
                             std::vector<Request> some;
                             for (; taken < order.size() && std::ssize(some) < count; ++taken) {
                               some.push_back(requests[order[taken]]);
                             }
                             return some;
                           },
                       .done = [&](std::size_t i, Completion result) { completions[order[i]] = std::move(result); },
                       .longest = longest};
  if (on_token) stream.on_token = [&](std::size_t i, std::int64_t token) { on_token(order[i], token); };
  run(stream, std::clamp<std::int64_t>(std::ssize(requests), 1, options_.max_batch));
  return completions;
}

std::int64_t Generator::rows_for(std::int64_t positions, std::int64_t requested) const {
  if (options_.cache_bytes == 0) return requested;
  const std::int64_t row = model_.make_cache(1, 1).bytes() * positions;
  const std::int64_t rows = runner_->agree_on_smallest(row == 0 ? requested : options_.cache_bytes / row);
  if (rows == 0) {
    throw Error(
        fmt::format("the keys and values of one sequence of {} tokens take {}, and cache_bytes allows {}: allow "
                    "more, or fewer new tokens",
                    positions, human_bytes(static_cast<std::uint64_t>(row)),
                    human_bytes(static_cast<std::uint64_t>(options_.cache_bytes))));
  }
  return std::min(rows, requested);
}

void Generator::run(const RequestStream& requests) { run(requests, options_.max_batch); }

void Generator::run(const RequestStream& requests, std::int64_t max_batch) {
  const c10::InferenceMode inference;
  const nn::EvaluationMode evaluating({&model_});
  const auto& config = model_.config();
  const std::int64_t positions = requests.longest == 0 ? config.max_seq_len : requests.longest;
  const std::int64_t rows = rows_for(positions, max_batch);
  // One scheduler for each stage, so that all stages have work.
  const std::int64_t schedulers = options_.stages ? std::min<std::int64_t>(options_.stages->size(), rows) : 1;
  struct Track {
    Scheduler scheduler;
    std::optional<ForwardBatch> in_flight;
  };
  const RopeScaling& scaling = config.rope_scaling;
  const std::int64_t refill_at = scaling.type == RopeScalingType::longrope ? scaling.original_max_seq_len : 0;
  std::list<Track> tracks;
  for (std::int64_t i = 0; i < schedulers; ++i) {
    const std::int64_t share = (rows + schedulers - 1 - i) / schedulers;
    tracks.push_back(
        Track{Scheduler(model_.make_cache(share, positions), options_.prefill_chunk, refill_at), std::nullopt});
  }

  std::size_t taken = 0;
  bool exhausted = false;
  const Scheduler::Next next = [&](std::int64_t free) {
    std::vector<std::unique_ptr<Sequence>> sequences;
    if (exhausted) return sequences;
    std::vector<Request> more = requests.next(free);
    if (std::ssize(more) > free) {
      throw Error(fmt::format("generation: next() gave {} requests for {} free rows", more.size(), free));
    }
    for (Request& request : more) {
      const std::size_t number = taken++;
      if (const auto fault = fault_of(request); !fault.empty()) {
        throw Error(fmt::format("{}: {}", place_of(request, number), fault));
      }
      if (positions_of(request) > positions) {
        throw Error(fmt::format("{}: it needs {} positions, and the cache was made for {}", place_of(request, number),
                                positions_of(request), positions));
      }
      stats_.prompt_tokens += std::ssize(request.prompt);
      sequences.push_back(std::make_unique<Sequence>(std::move(request), number, config.vocab_size, config.max_seq_len,
                                                     options_.tokenizer));
    }
    exhausted = sequences.empty();
    return sequences;
  };
  const auto finish = [&](Track& track) {
    const ForwardBatch batch = *std::exchange(track.in_flight, std::nullopt);
    const std::vector<std::int64_t> tokens = runner_->finish();
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      Sequence& sequence = track.scheduler.sequence_of(batch, batch.sample_rows[i]);
      if (sequence.take(tokens[i]) && requests.on_token) requests.on_token(sequence.number(), tokens[i]);
      if (!batch.is_prefill) ++stats_.decoded_tokens;
      if (!sequence.is_done()) continue;
      const auto ended = track.scheduler.remove(batch, batch.sample_rows[i]);
      const std::size_t number = ended->number();
      if (requests.done) requests.done(number, std::move(*ended).result());
    }
    return batch.is_prefill;
  };

  for (bool any = true; any;) {
    any = false;
    for (Track& track : tracks) {
      const auto begin = Clock::now();
      bool is_prefill = false;
      if (track.in_flight) is_prefill = finish(track);
      track.in_flight = track.scheduler.next_batch(next);
      if (track.in_flight) {
        any = true;
        const ForwardBatch& batch = *track.in_flight;
        is_prefill = batch.is_prefill;
        const auto of = [&](std::int64_t row) -> Sequence& { return track.scheduler.sequence_of(batch, row); };
        runner_->begin(
            batch, track.scheduler.cache(),
            {.from_logits = [&](auto row, std::span<const float> logits) { return of(row).choose(logits); },
             .takes_likeliest = [&](auto row) { return of(row).takes_likeliest(); },
             .likeliest = [&](auto row, auto token, auto logit) { return of(row).take_likeliest(token, logit); }});
      }
      const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      (is_prefill ? stats_.prefill_seconds : stats_.decode_seconds) += seconds;
    }
  }
}

}  // namespace phalanx::infer
