#include "phalanx/infer/generator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/models/llama.h"

namespace phalanx::infer {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Logits as floats in host memory: [batch, vocab], contiguous.
at::Tensor on_host(const at::Tensor& logits) { return logits.to(at::kCPU, at::kFloat).contiguous(); }

/// One request of the batch under way.
struct Row {
  const Request* request;
  Completion* completion;
  std::size_t number;  // among all requests
  Sampler sampler;
  bool done = false;
};

/// Takes the row's next token from its logits, or ends the row.
void advance(Row& row, std::span<const float> logits, std::int64_t max_seq_len, const Generator::OnToken& on_token) {
  auto& tokens = row.completion->tokens;
  const auto& request = *row.request;
  const std::int64_t token = row.sampler.sample(logits, tokens.size());
  if (std::ranges::find(request.stop_tokens, token) != request.stop_tokens.end()) {
    row.completion->reason = FinishReason::stop_token;
    row.done = true;
    return;
  }
  tokens.push_back(token);
  if (on_token) on_token(row.number, token);
  if (static_cast<std::int64_t>(tokens.size()) == request.max_new_tokens) {
    row.completion->reason = FinishReason::max_new_tokens;
    row.done = true;
  } else if (static_cast<std::int64_t>(request.prompt.size() + tokens.size()) == max_seq_len) {
    row.completion->reason = FinishReason::max_seq_len;
    row.done = true;
  }
}

}  // namespace

std::string_view name_of(FinishReason reason) {
  switch (reason) {
    case FinishReason::stop_token:
      return "stop_token";
    case FinishReason::max_new_tokens:
      return "max_new_tokens";
    case FinishReason::max_seq_len:
      return "max_seq_len";
  }
  return "";
}

Generator::Generator(models::Llama& model, GeneratorOptions options) : model_(model), options_(options) {
  if (options_.max_batch < 1 || options_.prefill_chunk < 1)
    throw ConfigError(fmt::format("generation: max_batch is {} and prefill_chunk {}: expected 1 or more",
                                  options_.max_batch, options_.prefill_chunk));
  options_.prefill_chunk = std::min(options_.prefill_chunk, model_.config().max_seq_len);
  // There all positions of a prompt turn by its whole length.
  if (model_.config().rope_scaling.type == RopeScalingType::dynamic)
    options_.prefill_chunk = model_.config().max_seq_len;
}

void Generator::check(const std::vector<Request>& requests) const {
  const auto& config = model_.config();
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const auto& request = requests[i];
    const auto fail = [&](const std::string& reason) { throw Error(fmt::format("prompt {}: {}", i + 1, reason)); };
    request.sampling.validate();
    if (request.prompt.empty()) fail("it has no tokens");
    if (static_cast<std::int64_t>(request.prompt.size()) >= config.max_seq_len)
      fail(fmt::format("it has {} tokens; the model's max_seq_len of {} leaves room for at most {} and one new token",
                       request.prompt.size(), config.max_seq_len, config.max_seq_len - 1));
    if (request.max_new_tokens < 1)
      fail(fmt::format("max_new_tokens is {}: expected 1 or more", request.max_new_tokens));
    for (const auto token : request.prompt)
      if (token < 0 || token >= config.vocab_size)
        fail(fmt::format("token {} is not in the model's vocabulary of {}: is it another model's tokenizer?", token,
                         config.vocab_size));
  }
}

std::vector<Completion> Generator::generate(const std::vector<Request>& requests, const OnToken& on_token) {
  check(requests);
  const c10::InferenceMode inference;
  std::vector<Completion> completions(requests.size());
  const auto max_batch = static_cast<std::size_t>(options_.max_batch);
  for (std::size_t first = 0; first < requests.size(); first += max_batch) {
    const auto count = std::min(max_batch, requests.size() - first);
    run_batch(std::span(requests).subspan(first, count), first, completions, on_token);
  }
  return completions;
}

void Generator::run_batch(std::span<const Request> requests, std::size_t first, std::vector<Completion>& completions,
                          const OnToken& on_token) {
  const auto batch = static_cast<std::int64_t>(requests.size());
  const auto max_seq_len = model_.config().max_seq_len, vocab = model_.config().vocab_size;
  std::vector<Row> rows;
  std::int64_t longest_prompt = 0, longest_row = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    rows.push_back({&requests[i], &completions[first + i], first + i, Sampler(requests[i].sampling, vocab)});
    const auto length = static_cast<std::int64_t>(requests[i].prompt.size());
    longest_prompt = std::max(longest_prompt, length);
    longest_row = std::max(longest_row, std::min(max_seq_len, length + requests[i].max_new_tokens));
    stats_.prompt_tokens += length;
  }
  // A chunk's padding is written behind a row's real tokens, so a long prompt's neighbours need room for it.
  const std::int64_t padding = longest_prompt > options_.prefill_chunk ? options_.prefill_chunk : 1;
  auto cache = model_.make_cache(batch, longest_row + padding);
  const auto device = cache.options().device;
  const auto forward = [&](const at::Tensor& tokens, std::vector<std::int64_t> counts) {
    return on_host(model_.forward(tokens.to(device), cache, std::move(counts)));
  };
  const auto logits_of = [&](const at::Tensor& logits, std::int64_t row) {
    return std::span(logits.const_data_ptr<float>() + row * vocab, static_cast<std::size_t>(vocab));
  };

  auto begin = std::chrono::steady_clock::now();
  for (std::int64_t done = 0; done < longest_prompt; done += options_.prefill_chunk) {
    const std::int64_t width = std::min(options_.prefill_chunk, longest_prompt - done);
    const at::Tensor tokens = at::zeros({batch, width}, at::TensorOptions(at::kLong));
    std::vector<std::int64_t> counts;
    for (std::int64_t r = 0; r < batch; ++r) {
      const auto& prompt = requests[static_cast<std::size_t>(r)].prompt;
      const auto left = static_cast<std::int64_t>(prompt.size()) - done;
      counts.push_back(std::clamp<std::int64_t>(left, 0, width));
      std::copy_n(prompt.begin() + std::min<std::int64_t>(done, static_cast<std::int64_t>(prompt.size())),
                  counts.back(), tokens.mutable_data_ptr<std::int64_t>() + r * width);
    }
    const bool full = std::ranges::all_of(counts, [&](std::int64_t count) { return count == width; });
    const at::Tensor logits = forward(tokens, full ? std::vector<std::int64_t>{} : counts);
    for (std::int64_t r = 0; r < batch; ++r) {
      auto& row = rows[static_cast<std::size_t>(r)];
      const bool ends_here =
          counts[static_cast<std::size_t>(r)] > 0 &&
          done + counts[static_cast<std::size_t>(r)] == static_cast<std::int64_t>(row.request->prompt.size());
      if (ends_here) advance(row, logits_of(logits, r), max_seq_len, on_token);
    }
  }
  stats_.prefill_seconds += seconds_since(begin);

  begin = std::chrono::steady_clock::now();
  const at::Tensor next = at::zeros({batch, 1}, at::TensorOptions(at::kLong));
  auto* const next_tokens = next.mutable_data_ptr<std::int64_t>();
  while (!std::ranges::all_of(rows, &Row::done)) {
    for (std::int64_t r = 0; r < batch; ++r) {
      const auto& row = rows[static_cast<std::size_t>(r)];
      // A finished row goes on with any token where it is; its results are not looked at, and it is kept from
      // outgrowing the cache.
      if (!row.completion->tokens.empty()) next_tokens[r] = row.completion->tokens.back();
      if (row.done && cache.length(r) + 1 >= cache.options().max_len) cache.truncate(r, 0);
    }
    const at::Tensor logits = forward(next, {});
    for (std::int64_t r = 0; r < batch; ++r) {
      auto& row = rows[static_cast<std::size_t>(r)];
      if (row.done) continue;
      advance(row, logits_of(logits, r), max_seq_len, on_token);
      ++stats_.decoded_tokens;
    }
  }
  stats_.decode_seconds += seconds_since(begin);
}

}  // namespace phalanx::infer
