// A GPT of ten layers, sharded block by block, trained in two runs: the second resumes from the checkpoint of the
// first.
//
//   phalanx launch -n 2 -- gpt_sharded --folder gpt             20 steps, then a checkpoint
//   phalanx launch -n 2 -- gpt_sharded --folder gpt             resumes, and trains 20 more steps
//   ... --bf16             units are unsharded and used in bfloat16; the shards, which are stepped, stay float32
//   ... --no-prefetch      a unit is unsharded only when it is used
//
// The net is constructed without memory: each rank allocates only its own rows of every parameter.
#include <torch/torch.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/launch/supervisor/worker_report.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/nn/embedding.h"
#include "phalanx/nn/linear.h"
#include "phalanx/nn/rms_norm.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/grad_norm.h"
#include "phalanx/parallel/fsdp/fully_shard.h"

namespace nn = phalanx::nn;
using torch::Tensor;

constexpr int64_t kLayers = 10, kDim = 64, kHeads = 4, kSeq = 16, kVocabulary = 128, kBatch = 8, kSteps = 20;
const nn::TensorOptionsOfModule kBornWithoutMemory{.without_memory = true};

std::shared_ptr<nn::Linear> linear(int64_t in, int64_t out) {
  return std::make_shared<nn::Linear>(nn::LinearOptions{.in_features = in, .out_features = out}, kBornWithoutMemory);
}

struct Block : nn::Module {
  Block() {
    register_module("attention_norm", attention_norm);
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("ffn_norm", ffn_norm);
    register_module("up", up);
    register_module("down", down);
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

  std::shared_ptr<nn::RMSNorm> attention_norm = std::make_shared<nn::RMSNorm>(kDim, 1e-5, kBornWithoutMemory);
  std::shared_ptr<nn::RMSNorm> ffn_norm = std::make_shared<nn::RMSNorm>(kDim, 1e-5, kBornWithoutMemory);
  std::shared_ptr<nn::Linear> qkv = linear(kDim, 3 * kDim), out = linear(kDim, kDim);
  std::shared_ptr<nn::Linear> up = linear(kDim, 4 * kDim), down = linear(4 * kDim, kDim);
};

/// Each block is a unit; the rest, embeddings and head, belongs to the root.
struct Gpt : nn::Module {
  Gpt() {
    register_module("tokens", tokens);
    register_module("positions", positions);
    register_module("blocks", blocks);
    register_module("head", head);
    for (int64_t i = 0; i < kLayers; ++i) blocks->push_back(std::make_shared<Block>());
  }
  Tensor forward(const Tensor& ids) {  // [batch, seq] -> [batch, seq, vocabulary]
    Tensor x = call(tokens, ids) + call(positions, torch::arange(ids.size(1)));
    for (const auto& block : *blocks) x = call(std::static_pointer_cast<Block>(block), x);
    return call(head, x);
  }

  static std::shared_ptr<nn::Embedding> embedding(int64_t count) {
    return std::make_shared<nn::Embedding>(nn::EmbeddingOptions{.count = count, .dim = kDim}, kBornWithoutMemory);
  }
  std::shared_ptr<nn::Embedding> tokens = embedding(kVocabulary), positions = embedding(kSeq);
  torch::nn::ModuleList blocks;
  std::shared_ptr<nn::Linear> head = linear(kDim, kVocabulary);
};

int main(int argc, char** argv) try {
  std::string folder = "gpt_sharded";
  phalanx::FullyShardOptions options{.output_dtype = torch::kFloat};
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--folder" && i + 1 < argc) {
      folder = argv[++i];
    } else if (flag == "--bf16") {
      options.param_dtype = torch::kBFloat16;
      options.reduce_dtype = torch::kFloat;
    } else if (flag == "--no-prefetch") {
      options.prefetch = false;
    } else {
      std::fprintf(stderr, "gpt_sharded: '%s' is none of --folder FOLDER, --bf16, --no-prefetch\n", flag.c_str());
      return 2;
    }
  }
  const phalanx::ProcessContext context = phalanx::init_from_environment({.device = "cpu"});
  if (kBatch % context.world_size != 0) throw phalanx::UsageError("a batch of 8 rows goes to 1, 2, 4 or 8 ranks");
  Gpt model;
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

  const int64_t first = state.integers["step"], share = kBatch / context.world_size;
  double loss_now = 0;
  for (int64_t step = first; step < first + kSteps; ++step) {
    torch::manual_seed(step);  // the same batch on every rank, which uses its rows; a token follows from the last
    const Tensor start = torch::randint(kVocabulary, {kBatch, 1}),
                 rows = (start + 5 * torch::arange(kSeq + 1)) % kVocabulary;
    const Tensor mine = rows.narrow(0, context.rank * share, share);
    const Tensor logits = nn::call(model, mine.narrow(1, 0, kSeq));
    Tensor loss = torch::cross_entropy_loss(logits.flatten(0, 1), mine.narrow(1, 1, kSeq).flatten());
    loss.backward();
    phalanx::clip_grad_norm(sharded.parameters(), 1.0, context.world.get());
    optimizer.step(3e-3);
    optimizer.zero_grad();
    loss = loss.detach().clone();
    context.world->all_reduce(loss, {.op = phalanx::ReduceOp::avg});
    loss_now = loss.item<double>();
  }
  state.integers["step"] = first + kSteps;
  checkpoints.save(state, first + kSteps);
  if (context.rank == 0) {
    std::printf("%d rank(s): %s step %ld, done step %ld: loss %.4f, %ld units, %ld of %ld gathered ahead\n",
                context.world_size, first > 0 ? "continued from" : "began at", static_cast<long>(first),
                static_cast<long>(first + kSteps), loss_now, static_cast<long>(sharded.units().size()),
                static_cast<long>(sharded.statistics().prefetches), static_cast<long>(sharded.statistics().gathers));
  }
  return 0;
} catch (const phalanx::Error& error) {
  if (!phalanx::report_error_to_launcher(error)) std::fprintf(stderr, "gpt_sharded: %s\n", error.what());
  return error.exit_status();
}
