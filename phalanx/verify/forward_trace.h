// ForwardTrace records what forward passes send from module to module, and the weights they use, to find where two runs
// of one model diverge.
//
//   ForwardTrace trace(model);                                  // attaches hooks to the modules, permanently
//   trace.start(rows);                                          // clears what was recorded
//   run_forward_and_backward();
//   for (const ForwardTrace::ModuleRecord& record : trace.seen()) compare(record);   // in the order of use
//
// - The modules are Phalanx's own and are run by call().
// - Fused kernels are disabled by the hooks, so a traced pass rounds differently from other passes.
// - Layers that a backward pass recomputes are not recorded again.
// - Records are copied to the host in float64.
// - REQUIRES: the model is not run after the trace is destroyed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/nn/module.h"

namespace phalanx::verify {

class ForwardTrace {
 public:
  struct ModuleRecord {
    std::string module;                  // "layers.0.attention.wq"
    bool has_weight = false;             // has its own weight; else it passes its input on to submodules
    std::vector<at::Tensor> inputs;      // of the calls so far
    std::int64_t rows = 0;               // of all inputs
    at::Tensor weight;                   // this rank's part, full if it was unsharded; as in the first call
    at::Tensor backward_weight;          // the same when the first gradient of its output arrives
    std::shared_ptr<const Shard> shard;  // which part; null: all of it
    at::Tensor input() const;            // `inputs` concatenated along the first dimension; undefined: none recorded
  };

  explicit ForwardTrace(nn::Module& model);
  ForwardTrace(const ForwardTrace&) = delete;
  ForwardTrace& operator=(const ForwardTrace&) = delete;

  /// Clears the records. The inputs of each module are recorded until they have `rows` rows.
  void start(std::int64_t rows);
  /// After the passes: records the weights of modules that were not called, such as a tied embedding on the stage that
  /// only multiplies by it. They have no inputs.
  void note_uncalled();
  const std::vector<ModuleRecord>& seen() const noexcept { return seen_; }
  const ModuleRecord* find(const std::string& module) const;

 private:
  void attach(const std::string& name, nn::Module& module);
  ModuleRecord& place_of(const std::string& module);
  void note_weight(const std::string& module, nn::Module& of, at::Tensor ModuleRecord::*where);

  std::int64_t wanted_rows_ = 0;
  std::vector<std::pair<std::string, nn::Module*>> with_weight_;  // the modules with hooks and a weight
  std::vector<ModuleRecord> seen_;
};

}  // namespace phalanx::verify
