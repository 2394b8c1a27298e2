#include "phalanx/infer/evaluate.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <numeric>
#include <span>

#include "phalanx/base/error.h"
#include "phalanx/comm/communicator.h"
#include "phalanx/models/llama.h"

namespace phalanx::infer {
namespace {

constexpr std::size_t kPassesUnderWay = 4;  // limits the hidden states that the next stage has not received yet

/// How many of the next `most` texts, which are ordered from the longest on, may share a batch: those whose rotary
/// angles are those of the longest, which the batch is padded to.
std::int64_t rows_of_batch(const models::LlamaConfig& config, const std::vector<ScoredText>& texts,
                           std::span<const std::size_t> next, std::int64_t most) {
  const RopeScaling& scaling = config.rope_scaling;
  const auto width = [&](std::int64_t r) { return std::ssize(texts[next[static_cast<std::size_t>(r)]].tokens) - 1; };
  std::int64_t rows = 1;
  const auto has_same_angles = [&](std::int64_t r) {
    if (!scaling.depends_on_length() || width(0) <= scaling.original_max_seq_len || width(r) == width(0)) return true;
    return scaling.type != RopeScalingType::dynamic && width(r) > scaling.original_max_seq_len;
  };
  while (rows < std::min(most, std::ssize(next)) && has_same_angles(rows)) ++rows;
  return rows;
}

}  // namespace

std::vector<TextWindow> windows_of(std::int64_t size, std::int64_t seq, std::int64_t stride) {
  std::vector<TextWindow> windows;
  for (std::int64_t scored = 1; scored < size;) {
    // The first window scores all of its tokens, the others their last `stride`.
    const std::int64_t end = std::min(size, windows.empty() ? seq + 1 : scored + stride);
    windows.push_back({.begin = std::max<std::int64_t>(0, end - seq - 1), .end = end, .first = scored});
    scored = end;
  }
  return windows;
}

Evaluator::Evaluator(models::Llama& model, EvaluatorOptions options) : model_(model), options_(std::move(options)) {
  if (options_.max_batch < 1) {
    throw ConfigError(fmt::format("evaluation: max_batch is {}: expected 1 or more", options_.max_batch));
  }
  if (!options_.stages && !model.part().is_whole(model.config())) {
    throw ConfigError(fmt::format("evaluation: the model is a part ({}): expected the communicator of all its stages",
                                  model.part().text()));
  }
}

void Evaluator::check(const std::vector<ScoredText>& texts) const {
  const auto& config = model_.config();
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const auto& [tokens, first, is_scored] = texts[i];
    const auto fail = [&](const std::string& reason) { throw Error(fmt::format("text {}: {}", i + 1, reason)); };
    if (first < 1 || first >= std::ssize(tokens)) {
      fail(fmt::format("tokens from {} on are to be scored, of {}: expected at least one before them and one of them",
                       first, tokens.size()));
    }
    if (!is_scored.empty() && is_scored.size() != tokens.size()) {
      fail(fmt::format("it has {} tokens, and says of {} whether they are scored", tokens.size(), is_scored.size()));
    }
    if (std::ssize(tokens) - 1 > config.max_seq_len) {
      fail(fmt::format("it has {} tokens; the model's max_seq_len of {} leaves room for {}", tokens.size(),
                       config.max_seq_len, config.max_seq_len + 1));
    }
    for (const auto token : tokens) {
      if (token >= 0 && token < config.vocab_size) continue;
      fail(fmt::format("token {} is not in the model's vocabulary of {}: is it another model's tokenizer?", token,
                       config.vocab_size));
    }
  }
}

std::vector<double> Evaluator::log_likelihoods(const std::vector<ScoredText>& texts) {
  check(texts);
  const c10::InferenceMode inference;
  // Texts of similar length are batched together, so that there is little padding.
  std::vector<std::size_t> order(texts.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater(), [&](std::size_t i) { return texts[i].tokens.size(); });
  const at::Tensor sums = at::zeros({std::ssize(texts)}, at::TensorOptions(at::kDouble));
  double* sum = sums.mutable_data_ptr<double>();
  const at::TensorOptions activations = model_.activations();
  std::deque<Work> sent;
  std::int64_t rows = 0;
  for (std::size_t from = 0; from < order.size(); from += static_cast<std::size_t>(rows)) {
    rows = rows_of_batch(model_.config(), texts, std::span(order).subspan(from), options_.max_batch);
    const std::int64_t width = std::ssize(texts[order[from]].tokens) - 1;
    const at::Tensor inputs = at::zeros({rows, width}, at::TensorOptions(at::kLong));
    const at::Tensor labels = at::full({rows, width}, -1, at::TensorOptions(at::kLong));
    for (std::int64_t r = 0; r < rows; ++r) {
      const auto& [tokens, first, is_scored] = texts[order[from + static_cast<std::size_t>(r)]];
      std::copy(tokens.begin(), tokens.end() - 1, inputs.mutable_data_ptr<std::int64_t>() + r * width);
      std::int64_t* const of_row = labels.mutable_data_ptr<std::int64_t>() + r * width - 1;  // by the token itself
      for (auto at = static_cast<std::size_t>(first); at < tokens.size(); ++at) {
        if (is_scored.empty() || is_scored[at] != 0) of_row[at] = tokens[at];
      }
    }
    at::Tensor x = inputs.to(activations.device());
    if (!model_.part().embedding) {
      x = at::empty({rows, width, model_.config().dim}, activations);
      options_.stages->recv(x, options_.stages->rank() - 1);
    }
    if (!model_.part().head) {
      const at::Tensor hidden = model_.forward(x).contiguous();
      sent.push_back(options_.stages->send(hidden, options_.stages->rank() + 1, {.async = true}));
      for (; sent.size() > kPassesUnderWay; sent.pop_front()) sent.front().wait();
      continue;
    }
    const at::Tensor scores =
        model_.log_likelihoods(x, labels.to(activations.device())).to(at::kDouble).sum(1).to(at::kCPU).contiguous();
    for (std::int64_t r = 0; r < rows; ++r) {
      sum[order[from + static_cast<std::size_t>(r)]] = scores.const_data_ptr<double>()[r];
    }
  }
  for (Work& work : sent) work.wait();
  at::Tensor all = sums;
  if (options_.stages && sums.numel() > 0) {
    all = sums.to(activations.device());
    options_.stages->broadcast(all, {.root = options_.stages->size() - 1});
    all = all.to(at::kCPU);
  }
  return {all.const_data_ptr<double>(), all.const_data_ptr<double>() + all.numel()};
}

}  // namespace phalanx::infer
