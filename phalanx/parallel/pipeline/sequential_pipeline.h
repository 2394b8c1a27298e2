// SequentialPipeline: cuts a whole torch::nn::Sequential into stages and runs this rank's, with one call.
//
//   torch::nn::Sequential net(torch::nn::Linear(16, 8), torch::nn::ReLU(), torch::nn::Linear(8, 4));
//   SequentialPipeline pipeline(net, loss_of, world, {.chunks = 8});        // loss_of(output, target): a mean
//   AdamW optimizer(pipeline.parameters());                                // of this rank's stages
//   const double loss = pipeline.runtime().step(x, y).loss();              // the same number on every rank
//   optimizer.step(lr);
//
// The stages have the original's children, under their names ("2.weight"). Drop the original, and a rank holds only its
// own. Everything else is as in pipeline_runtime.h and split_sequential.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/parallel/pipeline/pipeline_runtime.h"
#include "phalanx/parallel/pipeline/split_sequential.h"
#include "phalanx/tensor/named.h"

namespace phalanx {

struct SequentialPipelineOptions {
  int chunks = 1;                  // micro-batches of a batch
  std::string schedule = "GPipe";  // by its name in schedule/generators.h
  int stages_per_rank = 0;         // 0: as many as the schedule usually has
  std::vector<int> children;       // of each stage; empty: stages with about equal numbers of parameters
  PipelineOptions runtime;
};

class SequentialPipeline {
 public:
  using Loss = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

  /// Collective over the communicator. Throws ConfigError if the Sequential has fewer children than there are stages,
  /// if `children` does not have a number above 0 for each stage that together are all children, if two children share
  /// a parameter, and for a schedule that cannot be.
  /// REQUIRES: all ranks have the same Sequential, with the same values, and the same options.
  SequentialPipeline(const torch::nn::SequentialImpl& whole, const Loss& loss, std::shared_ptr<Communicator> comm,
                     const SequentialPipelineOptions& options = {});
  template <class Holder>
  requires requires(const Holder& holder) { holder.ptr(); }
  SequentialPipeline(const Holder& whole, const Loss& loss, std::shared_ptr<Communicator> comm,
                     const SequentialPipelineOptions& options = {})
      : SequentialPipeline(*whole, loss, std::move(comm), options) {}

  /// Of this rank's stages, for its optimizer.
  const std::vector<NamedTensor>& parameters() const noexcept { return parameters_; }
  PipelineRuntime& runtime() noexcept { return *runtime_; }

 private:
  std::vector<NamedTensor> parameters_;
  std::unique_ptr<PipelineRuntime> runtime_;
};

}  // namespace phalanx
