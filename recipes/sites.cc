// A pipeline inside each site, data parallelism between the sites. The slow link between them carries only one
// all-reduce of gradients per step. It starts stage by stage while the pipelines are still computing.
//
// Data parallelism is the outermost axis of the mesh, so consecutive ranks, those of one node, make a pipeline. A
// site's first rank holds the embedding, its last one the output. The losses are those of one rank, which rank 0
// computes afterwards. recipes/combinations.sh runs it over a slow link; here both sites are on one node:
//
//   $ phalanx launch --nproc-per-node 4 -- sites --per-site 2
//   DeviceMesh((dp_replicate=2, pp=2), device: 'cpu'): in a site 1F1B over shm, between sites gradients over shm
//   iteration 1: loss 6.26769, 0.156 s
//   iteration 2: loss 6.25212, 0.107 s
//   iteration 3: loss 6.28397, 0.100 s
//   iteration 4: loss 6.28424, 0.108 s
//   iteration 5: loss 6.27725, 0.107 s
//   step 1: in sites 6.2676908, one rank 6.2676909
//   step 2: in sites 6.2521180, one rank 6.2521179
//   step 3: in sites 6.2839667, one rank 6.2839668
//   step 4: in sites 6.2842357, one rank 6.2842355
//   step 5: in sites 6.2772543, one rank 6.2772543
//   losses differ from one rank's by 2.8e-08 of them: the same
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <chrono>

#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/pipeline/pipeline_runtime.h"
#include "phalanx/schedule/generators.h"
#include "recipes/recipe.h"

namespace {

using phalanx::DistributedDataParallel;
using phalanx::models::Llama;

struct Options {
  int per_site = 0, iterations = 5;
  std::string schedule = "1F1B";
};

constexpr int kMicroBatches = 4, kSequences = 8;  // per site and step
constexpr std::int64_t kSeq = 64;
const phalanx::models::LlamaConfig kModel = {
    .dim = 128, .n_layers = 4, .n_heads = 4, .n_kv_heads = 2, .ffn_hidden = 352, .vocab_size = 512};

/// [sequences, seq + 1] of one site.
at::Tensor tokens_of(int iteration, int site) {
  const at::Tensor values = at::empty({kSequences, kSeq + 1});
  phalanx::fill(values, phalanx::Init::uniform(0.0, static_cast<double>(kModel.vocab_size)), 3,
                fmt::format("tokens {} of {}", iteration, site));
  return values.to(at::kLong).clamp_max(kModel.vocab_size - 1);
}

/// The mean losses of a run.
std::vector<double> train_in_sites(const phalanx::ProcessContext& context, const Options& options) {
  const int ranks = context.world_size, per_site = options.per_site;
  const phalanx::DeviceMesh mesh(context.world, {{"dp_replicate", ranks / per_site}, {"pp", per_site}});
  const auto sites = mesh.communicator("dp_replicate");
  const auto schedule =
      phalanx::schedule::make_schedule({.name = options.schedule, .ranks = per_site, .micro_batches = kMicroBatches});
  const auto parts = phalanx::models::balance_llama(kModel, schedule.stages(), kSeq);
  std::vector<phalanx::PipelineStage> stages;
  std::vector<std::unique_ptr<DistributedDataParallel>> averages;
  std::vector<phalanx::NamedTensor> parameters;
  for (const int s : schedule.stages_of(mesh.coordinate("pp"))) {
    const auto& part = parts[static_cast<std::size_t>(s)];
    const auto model =
        std::make_shared<Llama>(kModel, part, phalanx::nn::TensorOptionsOfModule{.device = context.device});
    phalanx::nn::initialise(*model, /*seed=*/1);
    stages.push_back(part.head ? phalanx::make_loss_stage(s, model) : phalanx::make_stage(s, model));
    averages.push_back(std::make_unique<DistributedDataParallel>(*model, sites));
    for (const auto& p : averages.back()->parameters()) parameters.push_back(p);
  }
  phalanx::PipelineRuntime pipeline(mesh.communicator("pp"), schedule, stages);
  phalanx::AdamW optimizer(parameters);
  if (context.rank == 0) {
    fmt::print("{}: in a site {} over {}, between sites gradients over {}\n", mesh.text(), schedule.name,
               mesh.communicator("pp")->backend_name(), sites->backend_name());
  }
  std::vector<double> losses;
  for (int i = 0; i < options.iterations; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const at::Tensor tokens = tokens_of(i, mesh.coordinate("dp_replicate")).to(context.device);
    const double loss = pipeline.step(tokens.narrow(1, 0, kSeq), tokens.narrow(1, 1, kSeq)).loss();
    optimizer.step(3e-3);
    optimizer.zero_grad();
    const at::Tensor mean = at::empty({1}, at::kDouble).fill_(loss);
    sites->all_reduce(mean, {.op = phalanx::ReduceOp::avg});
    losses.push_back(mean.item<double>());
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (context.rank == 0) fmt::print("iteration {}: loss {:.5f}, {:.3f} s\n", i + 1, losses.back(), took.count());
  }
  return losses;
}

std::vector<double> train_alone(int sites, const Options& options, at::Device device) {
  Llama model(kModel, {.device = device});
  phalanx::nn::initialise(model, /*seed=*/1);
  phalanx::AdamW optimizer(phalanx::nn::named_parameters(model));
  std::vector<double> losses;
  for (int i = 0; i < options.iterations; ++i) {
    losses.push_back(0);
    for (int site = 0; site < sites; ++site) {
      const at::Tensor tokens = tokens_of(i, site).to(device);
      const at::Tensor loss = model.loss(tokens.narrow(1, 0, kSeq), tokens.narrow(1, 1, kSeq)) / sites;
      loss.backward();
      losses.back() += loss.item<double>();
    }
    optimizer.step(3e-3);
    optimizer.zero_grad();
  }
  return losses;
}

bool run(const phalanx::ProcessContext& context, Options options) {
  if (options.per_site == 0) options.per_site = context.local_world_size;
  if (context.world_size % options.per_site != 0) {
    throw phalanx::ConfigError(fmt::format("{} ranks make no sites of {}: expected --per-site to divide them",
                                           context.world_size, options.per_site));
  }
  const std::vector<double> losses = train_in_sites(context, options);
  context.world->barrier();
  if (context.rank != 0) return true;
  const auto alone = train_alone(context.world_size / options.per_site, options, context.device);
  const double apart = recipe::print_losses({{"in sites", losses}, {"one rank", alone}});
  fmt::print("losses differ from one rank's by {:.1e} of them: {}\n", apart, recipe::verdict(apart < 2e-5));
  return apart < 2e-5;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  recipe::Program program;
  program.init().loads_kernels_at_start = true;  // a pipeline over NCCL needs it
  program.add_option("--per-site", options.per_site, "ranks of a pipeline; 0: those of a node")
      ->check(recipe::at_least(0));
  program.add_option("--schedule", options.schedule, "of the pipeline");
  program.add_option("--iterations", options.iterations, "optimizer steps")->check(recipe::at_least(1));
  return program.run(argc, argv, [&](const auto& context) { return run(context, options); });
}
