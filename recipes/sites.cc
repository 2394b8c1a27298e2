// A pipeline inside each site, data parallelism between the sites. The slow link between them carries only one
// all-reduce of gradients per step. It starts stage by stage while the pipelines are still computing.
//
//   phalanx launch --nnodes 2 --nproc-per-node 2 ... -- sites            recipes/combinations.sh, over a slow link
//   phalanx launch --nproc-per-node 4 -- sites --per-site 2              the same on one node
//
// Data parallelism is the outermost axis of the mesh, so consecutive ranks, those of one node, make a pipeline. A
// site's first rank holds the embedding, its last one the output. The losses are those of one rank, which rank 0
// computes afterwards. Flags: --per-site, --schedule, --iterations.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>

#include "phalanx/base/error.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/launch/supervisor/worker_report.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/pipeline/pipeline_runtime.h"
#include "phalanx/schedule/generators.h"

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
    const auto model = std::make_shared<Llama>(kModel, part);
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
    const at::Tensor tokens = tokens_of(i, mesh.coordinate("dp_replicate"));
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

std::vector<double> train_alone(int sites, const Options& options) {
  Llama model(kModel);
  phalanx::nn::initialise(model, /*seed=*/1);
  phalanx::AdamW optimizer(phalanx::nn::named_parameters(model));
  std::vector<double> losses;
  for (int i = 0; i < options.iterations; ++i) {
    losses.push_back(0);
    for (int site = 0; site < sites; ++site) {
      const at::Tensor tokens = tokens_of(i, site);
      const at::Tensor loss = model.loss(tokens.narrow(1, 0, kSeq), tokens.narrow(1, 1, kSeq)) / sites;
      loss.backward();
      losses.back() += loss.item<double>();
    }
    optimizer.step(3e-3);
    optimizer.zero_grad();
  }
  return losses;
}

void run(const phalanx::ProcessContext& context, Options options) {
  if (options.per_site == 0) options.per_site = context.local_world_size;
  if (options.per_site < 1 || context.world_size % options.per_site != 0) {
    throw phalanx::ConfigError(fmt::format("{} ranks make no sites of {}: expected --per-site to divide them",
                                           context.world_size, options.per_site));
  }
  const std::vector<double> losses = train_in_sites(context, options);
  context.world->barrier();
  if (context.rank != 0) return;
  const std::vector<double> alone = train_alone(context.world_size / options.per_site, options);
  double largest = 0;
  for (std::size_t i = 0; i < alone.size(); ++i) largest = std::max(largest, std::abs(losses[i] / alone[i] - 1));
  fmt::print("losses differ from one rank's by {:.1e} of them: {}\n", largest,
             largest < 2e-5 ? "the same" : "DIFFERENT");
}

}  // namespace

int main(int argc, char** argv) try {
  Options options;
  CLI::App app("A pipeline in each site, data parallelism between sites");
  app.add_option("--per-site", options.per_site, "ranks of a pipeline; those of a machine if not given");
  app.add_option("--schedule", options.schedule, "of the pipeline")->capture_default_str();
  app.add_option("--iterations", options.iterations, "optimizer steps")->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  run(phalanx::init_from_environment({.device = "cpu"}), options);
  return 0;
} catch (const phalanx::Error& error) {
  if (!phalanx::report_error_to_launcher(error)) fmt::print(stderr, "sites: {}\n", error.what());
  return error.exit_status();
}
