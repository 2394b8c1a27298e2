#include "phalanx/lecture/sections.h"

#include "phalanx/lecture/steps.h"

namespace phalanx::lecture {

std::string_view Section::title() const {
  const std::string_view line = text->text.substr(0, text->text.find('\n'));
  return line.substr(line.find(' ') + 1);
}

const std::vector<Section>& sections() {
  static const std::vector<Section> all = {
      {"why", 1, &kWhyText},           {"hardware", 1, &kHardwareText}, {"collectives", 1, &kCollectivesText},
      {"ring", 1, &kRingText},         {"backends", 1, &kBackendsText}, {"benchmark", 1, &kBenchmarkText},
      {"streams", 1, &kStreamsText},   {"jobs", 1, &kJobsText},         {"data-parallel", 2, &kDataParallelText},
      {"zero", 2, &kZeroText},         {"tensor", 2, &kTensorText},     {"pipeline", 2, &kPipelineText},
      {"sequence", 2, &kSequenceText}, {"hybrids", 2, &kHybridsText},   {"inference", 2, &kInferenceText},
      {"summary", 2, &kSummaryText},
  };
  return all;
}

const std::vector<Step>& steps() {
  static const std::vector<Step> all = {
      {"spawn_ranks", spawn_ranks},
      {"model_sizes", model_sizes},
      {"three_scenarios", three_scenarios},
      {"machine_facts", machine_facts},
      {"measure_levels", measure_levels},
      {"local_or_sent", local_or_sent},
      {"bytes_and_links", bytes_and_links},
      {"draw_collectives", draw_collectives},
      {"run_collectives", run_collectives},
      {"ring_steps", ring_steps},
      {"tree_steps", tree_steps},
      {"draw_trees", draw_trees},
      {"cost_models", cost_models},
      {"send_and_receive", send_and_receive},
      {"async_and_barrier", async_and_barrier},
      {"benchmark", benchmark},
      {"benchmark_command", benchmark_command},
      {"overlap", overlap},
      {"read_environments", read_environments},
      {"one_step_by_hand", one_step_by_hand},
      {"three_ways", three_ways},
      {"data_parallel_traffic", data_parallel_traffic},
      {"data_parallel_memory", data_parallel_memory},
      {"uneven_means", uneven_means},
      {"zero3_moments", zero3_moments},
      {"zero_stages", zero_stages},
      {"tensor_moments", tensor_moments},
      {"columns_and_rows", columns_and_rows},
      {"tensor_parallel_training", tensor_parallel_training},
      {"sequence_moments", sequence_moments},
      {"sequence_parallel", sequence_parallel},
      {"draw_schedules", draw_schedules},
      {"naive_pipeline", naive_pipeline},
      {"pipeline_training", pipeline_training},
      {"draw_strategies", draw_strategies},
      {"mesh_training", mesh_training},
      {"split_inference", split_inference},
  };
  return all;
}

const std::vector<Source>& sources() {
  static const std::vector<Source> all = {
      {"recipes/collectives_tour.cc", &kCollectivesTour},
      {"recipes/ddp_by_hand.cc", &kDdpByHand},
      {"recipes/lifecycle.cc", &kLifecycle},
      {"recipes/llama_sharded_tensor_parallel.cc", &kLlamaShardedTensorParallel},
      {"recipes/overlap.cc", &kOverlap},
      {"recipes/pipeline_by_hand.h", &kPipelineByHand},
      {"recipes/tensor_parallel_by_hand.cc", &kTensorParallelByHand},
      {"recipes/tensor_parallel_toy.cc", &kTensorParallelToy},
      {"recipes/traced_stream.h", &kTracedStream},
      {"recipes/slurm/two_nodes_launcher.sbatch", &kTwoNodesLauncher},
      {"recipes/zero3_by_hand.cc", &kZero3ByHand},
      {"phalanx/lecture/machine_steps.cc", &kMachineSteps},
      {"phalanx/lecture/model_parallel_steps.cc", &kModelParallelSteps},
      {"phalanx/lecture/ring.cc", &kRing},
  };
  return all;
}

}  // namespace phalanx::lecture
