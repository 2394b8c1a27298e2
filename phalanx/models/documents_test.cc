// Rows of several documents give the losses, gradients and bits of the documents alone.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/randint.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/ignored_label.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/kernels/autocast.h"
#include "phalanx/models/llama.h"
#include "phalanx/models/testing/small_families.h"
#include "phalanx/nn/init.h"
#include "phalanx/parallel/activation_checkpoint.h"

namespace phalanx::models::documents_test {
namespace {

constexpr std::int64_t kSeq = 24, kRows = 2;
const std::vector<std::int32_t> kEnds = {0, 5, 6, 20, 24, 33, 48};  // the last one is padding

std::vector<LlamaConfig> families() { return small_families(/*n_layers=*/2, kSeq); }

std::shared_ptr<Llama> make_model(const LlamaConfig& config, bool recomputes = false) {
  auto model = std::make_shared<Llama>(config);
  nn::initialise(*model, 3);
  if (!recomputes) return model;
  for (const auto& layer : model->layers) checkpoint_activations(*layer, op_sac_policy);
  return model;
}

std::shared_ptr<const DocumentBoundaries> boundaries() {
  return std::make_shared<const DocumentBoundaries>(kSeq, kEnds);
}

struct Batch {
  at::Tensor tokens, labels;
};

/// Labels are any tokens but those of the last document.
Batch some_batch() {
  at::manual_seed(5);
  Batch batch{at::randint(61, {kRows, kSeq}, at::kLong), at::randint(61, {kRows, kSeq}, at::kLong)};
  batch.labels[1].narrow(0, 9, 15).fill_(kIgnoredLabel);
  return batch;
}

std::map<std::string, at::Tensor> gradients(const Llama& model) {
  std::map<std::string, at::Tensor> result;
  for (const auto& p : nn::named_parameters(model)) result[p.name] = p.tensor.grad().clone();
  return result;
}

TEST(PackedDocuments, LossAndGradientsAreThoseOfTheDocumentsAlone) {
  for (const LlamaConfig& config : families()) {
    for (const bool recomputes : {false, true}) {
      SCOPED_TRACE(std::string(family_name(config.family)) + (recomputes ? ", recomputed" : ""));
      const Batch batch = some_batch();
      const auto count = static_cast<double>((batch.labels != kIgnoredLabel).sum().item<std::int64_t>());
      const auto alone = make_model(config);
      double sum = 0;
      for (std::size_t i = 0; i + 1 < kEnds.size(); ++i) {
        const std::int64_t length = kEnds[i + 1] - kEnds[i];
        const auto part = [&](const at::Tensor& t) { return t.flatten().narrow(0, kEnds[i], length).unsqueeze(0); };
        const at::Tensor loss = alone->loss(part(batch.tokens), part(batch.labels), {.divisor = count});
        loss.backward();
        sum += loss.item<double>();
      }
      const auto packed = make_model(config, recomputes);
      const at::Tensor loss = packed->loss(batch.tokens, batch.labels, {.documents = boundaries(), .divisor = count});
      loss.backward();
      EXPECT_NEAR(loss.item<double>(), sum, 1e-6 * sum);
      for (std::size_t i = 0; i + 2 < kEnds.size(); ++i) {
        at::Tensor labels = at::full_like(batch.labels, kIgnoredLabel);
        const auto part = [&](const at::Tensor& t) {
          return t.view({-1}).narrow(0, kEnds[i], kEnds[i + 1] - kEnds[i]);
        };
        part(labels).copy_(part(batch.labels));
        const at::NoGradGuard no_grad;
        const double in_row =
            packed->loss(batch.tokens, labels, {.documents = boundaries(), .divisor = 1.0}).item<double>();
        const double by_itself =
            alone->loss(part(batch.tokens).unsqueeze(0), part(batch.labels).unsqueeze(0), {.divisor = 1.0})
                .item<double>();
        EXPECT_NEAR(in_row, by_itself, 1e-5 * by_itself) << "document " << i;
      }
      // Without a divisor the mean is over the tokens that have a label.
      EXPECT_NEAR(packed->loss(batch.tokens, batch.labels, {.documents = boundaries()}).item<double>(), sum,
                  1e-6 * sum);
      const auto expected = gradients(*alone), got = gradients(*packed);
      for (const auto& [name, gradient] : expected) {
        // A key's bias has no gradient where there are no rotary positions: what is there is rounding.
        const double scale = name.ends_with("wk.bias") ? 1.0 : gradient.norm().item<double>();
        EXPECT_LT((gradient - got.at(name)).norm().item<double>(), 1e-5 * scale) << name;
      }
    }
  }
}

// Not even in the last bit does a document change the logits of another. An expert multiplies the tokens of all
// documents at once: how many they are may change how a product is rounded.
TEST(PackedDocuments, AChangedTokenMovesNoLogitOfAnotherDocument) {
  const at::NoGradGuard no_grad;
  for (const LlamaConfig& config : families()) {
    for (const std::optional<at::ScalarType> products : {std::optional<at::ScalarType>(), {at::kBFloat16}}) {
      SCOPED_TRACE(std::string(family_name(config.family)) + (products ? ", bfloat16" : ""));
      const auto model = make_model(config);
      const auto logits = [&](const at::Tensor& tokens) {
        std::optional<kernels::AutocastScope> scope;
        if (products) scope.emplace(at::kCPU, kernels::AutocastState{true, *products});
        return model->forward(tokens, boundaries()).to(at::kFloat).flatten(0, 1);
      };
      const at::Tensor tokens = some_batch().tokens, before = logits(tokens);
      for (const std::int64_t changed : {0, 5, 12, 23, 24, 47}) {
        at::Tensor other = tokens.clone();
        at::Tensor flat = other.flatten();
        flat[changed] = (flat[changed] + 1) % 61;
        const at::Tensor after = logits(other);
        for (std::size_t i = 0; i + 1 < kEnds.size(); ++i) {
          const bool is_own = kEnds[i] <= changed && changed < kEnds[i + 1];
          const auto part = [&](const at::Tensor& t) { return t.narrow(0, kEnds[i], kEnds[i + 1] - kEnds[i]); };
          const double moved = (part(after) - part(before)).abs().max().item<double>();
          if (is_own) {
            EXPECT_GT(moved, 0) << "document " << i;
          } else {
            EXPECT_LE(moved, config.has_experts() ? 1e-2 : 0.0) << "token " << changed << ", document " << i;
          }
        }
      }
    }
  }
}

TEST(PackedDocuments, BoundariesOfAnotherBatchAreRefused) {
  const auto model = make_model(families().front());
  const Batch batch = some_batch();
  EXPECT_NE(error_text<Error>([&] {
              model->loss(batch.tokens.narrow(0, 0, 1), batch.labels.narrow(0, 0, 1), {.documents = boundaries()});
            }).find("document boundaries of 2 rows of 24 tokens; expected those of the batch, 1 of 24"),
            std::string::npos);
}

// The angles of the dynamic scaling depend on the length of the sequence, which documents in a row do not share.
TEST(PackedDocuments, DynamicScalingTakesOnlyDocumentsWithinTheOriginalLength) {
  LlamaConfig config = families().front();
  config.rope_scaling = {.type = RopeScalingType::dynamic, .factor = 2.0, .original_max_seq_len = 10};
  const auto model = make_model(config);
  const auto rows = std::make_shared<const DocumentBoundaries>(kSeq, std::vector<std::int32_t>{0, kSeq, 2 * kSeq});
  EXPECT_TRUE(at::equal(model->forward(some_batch().tokens, rows), model->forward(some_batch().tokens)));
  EXPECT_NE(error_text<Error>([&] { model->forward(some_batch().tokens, boundaries()); }).find("a document of 15"),
            std::string::npos);
}

}  // namespace
}  // namespace phalanx::models::documents_test
