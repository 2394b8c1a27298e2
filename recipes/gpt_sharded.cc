// A GPT of ten layers, sharded block by block, trained in two runs: the second resumes from the first's checkpoint.
//
//   $ phalanx launch -n 2 -- gpt_sharded --folder gpt             # 20 steps, then a checkpoint
//   2 rank(s): began at step 0, done step 20: loss 2.8100, 11 units, 380 of 400 gathered ahead
//   $ phalanx launch -n 2 -- gpt_sharded --folder gpt             # resumes, and trains 20 more steps
//   2 rank(s): continued from step 20, done step 40: loss 2.0503, 11 units, 380 of 400 gathered ahead
//
// The net is constructed without memory: each rank allocates only its own rows of every parameter.
#include <fmt/format.h>
#include <torch/torch.h>

#include <memory>

#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/nn/embedding.h"
#include "phalanx/nn/linear.h"
#include "phalanx/nn/rms_norm.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/grad_norm.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "recipes/recipe.h"

namespace nn = phalanx::nn;
using torch::Tensor;

namespace {

constexpr int64_t kLayers = 10, kDim = 64, kHeads = 4, kSeq = 16, kVocabulary = 128, kBatch = 8, kSteps = 20;

struct Block : nn::Module {
  explicit Block(nn::TensorOptionsOfModule tensor) {
    const auto linear = [&](const char* name, int64_t in, int64_t outputs) {
      return register_module(
          name, std::make_shared<nn::Linear>(nn::LinearOptions{.in_features = in, .out_features = outputs}, tensor));
    };
    attention_norm = register_module("attention_norm", std::make_shared<nn::RMSNorm>(kDim, 1e-5, tensor));
    qkv = linear("qkv", kDim, 3 * kDim);
    out = linear("out", kDim, kDim);
    ffn_norm = register_module("ffn_norm", std::make_shared<nn::RMSNorm>(kDim, 1e-5, tensor));
    up = linear("up", kDim, 4 * kDim);
    down = linear("down", 4 * kDim, kDim);
  }
  Tensor attention(const Tensor& x) const {  // [batch, seq, dim]
    const Tensor parts = call(qkv, x).view({x.size(0), x.size(1), 3, kHeads, kDim / kHeads}).transpose(1, 3);
    const Tensor y = at::scaled_dot_product_attention(parts.select(2, 0), parts.select(2, 1), parts.select(2, 2), {},
                                                      0.0, /*is_causal=*/true);  // [batch, heads, seq, dim / heads]
    return call(out, y.transpose(1, 2).flatten(2));
  }

  Tensor forward(Tensor x) {
    x = x + attention(call(attention_norm, x));
    return x + call(down, at::gelu(call(up, call(ffn_norm, x))));
  }

  std::shared_ptr<nn::RMSNorm> attention_norm, ffn_norm;
  std::shared_ptr<nn::Linear> qkv, out, up, down;
};

/// Each block is a unit; the rest, embeddings and head, belongs to the root.
struct Gpt : nn::Module {
  explicit Gpt(nn::TensorOptionsOfModule tensor) {
    const auto embedding = [&](const char* name, int64_t count) {
      return register_module(
          name, std::make_shared<nn::Embedding>(nn::EmbeddingOptions{.count = count, .dim = kDim}, tensor));
    };
    tokens = embedding("tokens", kVocabulary);
    positions = embedding("positions", kSeq);
    register_module("blocks", blocks);
    for (int64_t i = 0; i < kLayers; ++i) blocks->push_back(std::make_shared<Block>(tensor));
    head = register_module("head", std::make_shared<nn::Linear>(
                                       nn::LinearOptions{.in_features = kDim, .out_features = kVocabulary}, tensor));
  }
  Tensor forward(const Tensor& ids) {  // [batch, seq] -> [batch, seq, vocabulary]
    Tensor x = call(tokens, ids) + call(positions, torch::arange(ids.size(1), ids.options()));
    for (const auto& block : *blocks) x = call(std::static_pointer_cast<Block>(block), x);
    return call(head, x);
  }

  std::shared_ptr<nn::Embedding> tokens, positions;
  torch::nn::ModuleList blocks;
  std::shared_ptr<nn::Linear> head;
};

/// [rows of this rank, seq + 1]: a token follows from the last. Every rank draws the same batch and uses its rows.
Tensor batch_of(int64_t step, int64_t share, const phalanx::ProcessContext& context) {
  torch::manual_seed(step);
  const Tensor start = torch::randint(kVocabulary, {kBatch, 1});
  const Tensor rows = (start + 5 * torch::arange(kSeq + 1)) % kVocabulary;
  return rows.narrow(0, context.rank * share, share).to(context.device);
}

/// Returns the mean loss over the ranks.
double train_step(Gpt& model, phalanx::AdamW& optimizer, const Tensor& mine, const phalanx::ProcessContext& context) {
  const Tensor logits = nn::call(model, mine.narrow(1, 0, kSeq));
  const Tensor loss = torch::cross_entropy_loss(logits.flatten(0, 1), mine.narrow(1, 1, kSeq).flatten());
  loss.backward();
  phalanx::clip_grad_norm(optimizer.parameters(), 1.0, context.world.get());
  optimizer.step(3e-3);
  optimizer.zero_grad();
  Tensor mean = loss.detach().clone();
  context.world->all_reduce(mean, {.op = phalanx::ReduceOp::avg});
  return mean.item<double>();
}

bool train(const phalanx::ProcessContext& context, const std::string& folder, phalanx::FullyShardOptions options) {
  const int64_t share = recipe::share_of(kBatch, context.world_size);
  Gpt model({.device = context.device, .without_memory = true});
  const phalanx::DeviceMesh mesh(context.world, {{"dp_shard", context.world_size}});
  phalanx::FullyShardedDataParallel sharded(model, mesh, options);
  sharded.initialise(/*seed=*/1);
  phalanx::AdamW optimizer(sharded.parameters(), {.weight_decay = 0.01});

  phalanx::TrainState state;  // all that a checkpoint holds
  state.tensors = phalanx::with_prefix("model.", sharded.parameters());
  optimizer.collect_state(state);
  state.integers["step"] = 0;
  phalanx::CheckpointManager checkpoints(folder, {.keep_latest_k = 1}, context.world);
  if (checkpoints.load_latest(state)) sharded.invalidate_unsharded();

  const int64_t first = state.integers["step"];
  double loss = 0;
  for (int64_t step = first; step < first + kSteps; ++step)
    loss = train_step(model, optimizer, batch_of(step, share, context), context);
  state.integers["step"] = first + kSteps;
  checkpoints.save(state, first + kSteps);
  if (context.rank == 0) {
    fmt::print("{} rank(s): {} step {}, done step {}: loss {:.4f}, {} units, {} of {} gathered ahead\n",
               context.world_size, first > 0 ? "continued from" : "began at", first, first + kSteps, loss,
               sharded.units().size(), sharded.statistics().prefetches, sharded.statistics().gathers);
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  std::string folder = "gpt_sharded";
  bool bf16 = false, no_prefetch = false;
  recipe::Program program;
  program.add_option("--folder", folder, "of the checkpoints");
  program.add_flag("--bf16", bf16, "units are used in bfloat16; the shards, which are stepped, stay float32");
  program.add_flag("--no-prefetch", no_prefetch, "a unit is unsharded only when it is used");
  return program.run(argc, argv, [&](const phalanx::ProcessContext& context) {
    phalanx::FullyShardOptions options{.prefetch = !no_prefetch, .output_dtype = torch::kFloat};
    if (bf16) options.param_dtype = torch::kBFloat16, options.reduce_dtype = torch::kFloat;
    return train(context, folder, options);
  });
}
