// The Llama family and similar models, one after the other: what is special in each, and that all of them learn, in any
// layout.
//
//   $ families                                       # on one rank
//   llama      82240 parameters  loss 4.159 -> 0.003  goes on right  (RMSNorm, rotary, grouped queries, SwiGLU)
//   mistral    82240 parameters  loss 4.162 -> 0.003  goes on right  (a window of 16 positions)
//   qwen2      82496 parameters  loss 4.159 -> 0.003  goes on right  (biases of queries, keys and values)
//   qwen3     106944 parameters  loss 4.158 -> 0.003  goes on right  (norms of queries and keys, heads of 32)
//   mixtral   131904 parameters  loss 4.161 -> 0.003  goes on right  (4 experts, 2 a token)
//   gpt2       75264 parameters  loss 4.180 -> 0.004  goes on right  (LayerNorm, learnt positions, GELU, biases, tied)
//   6 of 6 families have learned
//   $ phalanx launch -n 4 -- families --tp 2         # tensor parallel over two, sharded over two pairs (ZeRO-3)
//   llama      82240 parameters  loss 4.159 -> 0.003  goes on right  (RMSNorm, rotary, grouped queries, SwiGLU)
//   mistral    82240 parameters  loss 4.162 -> 0.003  goes on right  (a window of 16 positions)
//   qwen2      82496 parameters  loss 4.159 -> 0.003  goes on right  (biases of queries, keys and values)
//   qwen3     106944 parameters  loss 4.158 -> 0.003  goes on right  (norms of queries and keys, heads of 32)
//   mixtral   131904 parameters  loss 4.161 -> 0.003  goes on right  (4 experts, 2 a token)
//   gpt2       75264 parameters  loss 4.180 -> 0.004  goes on right  (LayerNorm, learnt positions, GELU, biases, tied)
//   6 of 6 families have learned
//
// All are pre-norm decoders that differ in a few places (models/config/llama_config.h). Llama has RMSNorm, rotary
// positions, grouped queries and SwiGLU; Mistral a sliding window; Qwen2 a bias of queries, keys and values; Qwen3
// norms of queries and keys and heads of any width; Mixtral experts, of which each token uses two; GPT-2 LayerNorm,
// learnt positions, GELU and biases. Each trains for some steps on a repeating sequence, then continues it.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <vector>

#include "phalanx/infer/generator.h"
#include "phalanx/models/llama_parallel.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "recipes/recipe.h"

namespace {

using phalanx::models::LlamaConfig;
using phalanx::models::LlamaFamily;

constexpr std::int64_t kBatch = 4, kSeq = 32, kPeriod = 11;
const LlamaConfig kBase = {
    .dim = 64, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .ffn_hidden = 128, .vocab_size = 64, .max_seq_len = 64};

struct Family {
  const char* what;
  LlamaConfig config;
};

std::vector<Family> families() {
  const auto with = [](LlamaFamily family, const auto& change) {
    LlamaConfig config = kBase;
    config.family = family;
    change(config);
    return config;
  };
  const auto nothing = [](LlamaConfig&) {};
  return {
      {"RMSNorm, rotary, grouped queries, SwiGLU", kBase},
      {"a window of 16 positions", with(LlamaFamily::mistral, [](LlamaConfig& c) { c.sliding_window = 16; })},
      {"biases of queries, keys and values", with(LlamaFamily::qwen2, nothing)},
      {"norms of queries and keys, heads of 32", with(LlamaFamily::qwen3, [](LlamaConfig& c) { c.own_head_dim = 32; })},
      {"4 experts, 2 a token",
       with(LlamaFamily::mixtral, [](LlamaConfig& c) { c.experts = 4, c.experts_per_token = 2, c.ffn_hidden = 64; })},
      {"LayerNorm, learnt positions, GELU, biases, tied",
       with(LlamaFamily::gpt2, [](LlamaConfig& c) { c.n_kv_heads = c.n_heads, c.tie_embeddings = true; })},
  };
}

/// Token `place` of a repeating sequence; `row` decides where it begins.
std::int64_t token_at(std::int64_t row, std::int64_t place) { return 5 * ((row + place) % kPeriod) + 3; }

at::Tensor sequences(std::int64_t first_row, std::int64_t shift) {
  const at::Tensor tokens = at::empty({kBatch, kSeq}, at::TensorOptions(at::kLong));
  for (std::int64_t r = 0; r < kBatch; ++r) {
    for (std::int64_t t = 0; t < kSeq; ++t) {
      tokens.mutable_data_ptr<std::int64_t>()[r * kSeq + t] = token_at(first_row + r, t + shift);
    }
  }
  return tokens;
}

/// Returns whether the model continued the sequence as it should.
bool run(const Family& family, const phalanx::ProcessContext& context, int tp, int steps) {
  const phalanx::DeviceMesh mesh(context.world, {{"dp_shard", context.world_size / tp}, {"tp", tp}});
  phalanx::models::Llama model(family.config, {.device = context.device, .without_memory = true});
  phalanx::models::parallelize_llama(model, mesh, {.sequence_parallel = false});
  phalanx::FullyShardedDataParallel sharded(model, mesh);
  sharded.initialise(/*seed=*/1);
  phalanx::AdamW optimizer(sharded.parameters());
  double first = 0, last = 0;
  for (int step = 0; step < steps; ++step) {
    const std::int64_t row = kBatch * mesh.coordinate("dp_shard") + step;
    const at::Tensor loss = model.loss(sequences(row, 0).to(context.device), sequences(row, 1).to(context.device));
    loss.backward();
    optimizer.step(4e-3);
    optimizer.zero_grad();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::vector<std::int64_t> prompt, expected;
  for (std::int64_t t = 0; t < 14; ++t) prompt.push_back(token_at(2, t));
  for (std::int64_t t = 14; t < 26; ++t) expected.push_back(token_at(2, t));
  const auto made = phalanx::infer::Generator(model).generate(
      {{.prompt = prompt, .max_new_tokens = 12, .sampling = {.temperature = 0}}});
  const bool right = made[0].tokens == expected;
  if (context.rank == 0) {
    fmt::print("{:<8} {:>7} parameters  loss {:.3f} -> {:.3f}  {}  ({})\n",
               phalanx::models::family_name(family.config.family), family.config.parameter_count(), first, last,
               right ? "goes on right" : "goes on WRONG", family.what);
  }
  return right;
}

bool run_all(const phalanx::ProcessContext& context, int tp, int steps) {
  if (context.world_size % tp != 0) {
    throw phalanx::ConfigError(
        fmt::format("{} ranks make no groups of --tp {}: expected a multiple", context.world_size, tp));
  }
  std::size_t right = 0;
  for (const Family& family : families()) right += run(family, context, tp, steps);
  context.world->barrier();
  if (context.rank == 0) fmt::print("{} of {} families have learned\n", right, families().size());
  return right == families().size();
}

}  // namespace

int main(int argc, char** argv) {
  int tp = 1, steps = 80;
  recipe::Program program;
  program.add_option("--tp", tp, "ranks that share each matrix")->check(recipe::at_least(1));
  program.add_option("--steps", steps, "of training")->check(recipe::at_least(1));
  return program.run(argc, argv, [&](const auto& context) { return run_all(context, tp, steps); });
}
