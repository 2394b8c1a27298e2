// Sharded data parallelism over pairs of tensor-parallel ranks: a Llama 2 on a mesh (dp_shard, tp).
//
//   phalanx launch --nproc-per-node 4 -- llama_sharded_tensor_parallel            2 x 2 ranks
//   phalanx launch --nnodes 2 --nproc-per-node 4 ... -- llama_sharded_tensor_parallel      4 x 2, tp inside a node
//
// A pair of adjacent ranks shares every layer: attention by heads, feed-forward by hidden units, embedding, output and
// loss by ids, norms and residuals by positions. Each rank's part is sharded again over the pairs. No rank ever has the
// whole model, which has 18,089,216 parameters. Flags: --tp, --batch and --seq of each pair, --iterations.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>

#include "phalanx/base/error.h"
#include "phalanx/base/human.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/launch/supervisor/worker_report.h"
#include "phalanx/models/llama_parallel.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/grad_norm.h"
#include "phalanx/parallel/fsdp/fully_shard.h"

namespace {

struct Options {
  int tp = 2, iterations = 10;
  std::int64_t batch = 8, seq = 256;
};

const phalanx::models::LlamaConfig kLlama2 = {
    .dim = 256, .n_layers = 2, .n_heads = 16, .n_kv_heads = 16, .ffn_hidden = 768, .vocab_size = 32000};

/// [batch, seq + 1] of the pair `dp`: the same on both of its ranks.
at::Tensor random_tokens(const Options& options, int iteration, int dp) {
  const at::Tensor values = at::empty({options.batch, options.seq + 1});
  phalanx::fill(values, phalanx::Init::uniform(0.0, static_cast<double>(kLlama2.vocab_size)), 3,
                fmt::format("tokens {} of {}", iteration, dp));
  return values.to(at::kLong).clamp_max(kLlama2.vocab_size - 1);
}

void train(const phalanx::ProcessContext& context, const Options& options) {
  const int ranks = context.world_size;
  if (options.tp < 1 || ranks % options.tp != 0) {
    throw phalanx::ConfigError(
        fmt::format("{} ranks make no groups of tp = {}: {} % {} = {}; expected a multiple of {}", ranks, options.tp,
                    ranks, options.tp, options.tp > 0 ? ranks % options.tp : ranks, options.tp));
  }
  const phalanx::DeviceMesh mesh(context.world, {{"dp_shard", ranks / options.tp}, {"tp", options.tp}});
  phalanx::models::Llama model(kLlama2, {.without_memory = true});
  phalanx::models::parallelize_llama(model, mesh, {.sequence_parallel = true, .seq_len = options.seq});
  phalanx::FullyShardedDataParallel sharded(model, mesh);
  sharded.initialise(/*seed=*/1);
  phalanx::AdamW optimizer(sharded.parameters());
  std::int64_t mine = 0;
  for (const auto& p : sharded.parameters()) mine += p.tensor.numel();
  if (context.rank == 0) {
    fmt::print("{}: {} parameters, {} of them on rank 0\n", mesh.text(),
               phalanx::models::Llama(kLlama2, {.without_memory = true}).parameter_count(), mine);
  }
  for (int i = 0; i < options.iterations; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const at::Tensor tokens = random_tokens(options, i, mesh.coordinate("dp_shard"));
    const at::Tensor loss = model.loss(tokens.narrow(1, 0, options.seq), tokens.narrow(1, 1, options.seq));
    loss.backward();
    const double norm = phalanx::clip_grad_norm(sharded.parameters(), 1.0, context.world.get()).value();
    optimizer.step(3e-3);
    optimizer.zero_grad();
    const at::Tensor mean = loss.detach().clone();
    mesh.communicator("dp_shard")->all_reduce(mean, {.op = phalanx::ReduceOp::avg});
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (context.rank == 0) {
      fmt::print("iteration {:2}: loss {:.4f}, grad norm {:.4f}, {:.0f} tokens/s\n", i + 1, mean.item<double>(), norm,
                 static_cast<double>(options.batch * options.seq * mesh.size("dp_shard")) / took.count());
    }
  }
  context.world->barrier();
  if (context.rank == 0) fmt::print("Tensor- and data-parallel training is done.\n");
}

}  // namespace

int main(int argc, char** argv) try {
  Options options;
  CLI::App app("Sharded data parallelism over tensor-parallel pairs: a Llama 2");
  app.add_option("--tp", options.tp, "ranks that share each layer")->capture_default_str();
  app.add_option("--iterations", options.iterations, "optimizer steps")->capture_default_str();
  app.add_option("--batch", options.batch, "sequences of each group and iteration")->capture_default_str();
  app.add_option("--seq", options.seq, "tokens of a sequence")->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  train(phalanx::init_from_environment({.device = "cpu"}), options);
  return 0;
} catch (const phalanx::Error& error) {
  if (!phalanx::report_error_to_launcher(error)) {
    fmt::print(stderr, "llama_sharded_tensor_parallel: {}\n", error.what());
  }
  return error.exit_status();
}
