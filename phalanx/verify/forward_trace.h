// What forward passes hand from module to module, and the weights that they use on the way: for finding where two runs
// of one model part.
//
//   ForwardTrace trace(model);                     // attaches to the modules, for good
//   trace.start(rows);                             // forgets what it has
//   ... forward and backward passes ...
//   for (const auto& seen : trace.seen()) ...      // in the order of use
//
// Contract: a module of Phalanx's that is run by call(). Fused kernels step aside for the hooks, so that a traced pass
// rounds otherwise than others do. Layers that a backward pass runs again are not seen again. What is seen is copied
// to the host in float64. The model must not be run after the trace is gone.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/nn/module.h"

namespace phalanx::train {

class ForwardTrace {
 public:
  struct ModuleRecord {
    std::string module;                  // "layers.0.attention.wq"
    bool has_weight = false;             // its own: else it hands its input on to modules inside
    std::vector<at::Tensor> inputs;      // of the calls so far
    std::int64_t rows = 0;               // of them all
    at::Tensor weight;                   // this rank's part, whole where it was gathered; as in the first call
    at::Tensor backward_weight;          // the same when the first gradient of its output comes
    std::shared_ptr<const Shard> shard;  // which part; null: all
    at::Tensor input() const;            // one after the other along the first dimension; undefined: not seen
  };

  explicit ForwardTrace(nn::Module& model);
  ForwardTrace(const ForwardTrace&) = delete;
  ForwardTrace& operator=(const ForwardTrace&) = delete;

  /// Of each module inputs are kept until they are `rows` long.
  void start(std::int64_t rows);
  /// After the passes: takes down the weights of modules that were not called, such as a tied embedding on the stage
  /// that only multiplies by it. They have no inputs.
  void note_uncalled();
  const std::vector<ModuleRecord>& seen() const noexcept { return seen_; }
  const ModuleRecord* find(const std::string& module) const;

 private:
  void attach(const std::string& name, nn::Module& module);
  ModuleRecord& place_of(const std::string& module);
  void note_weight(const std::string& module, nn::Module& of, at::Tensor ModuleRecord::*where);

  std::int64_t wanted_rows_ = 0;
  std::vector<std::pair<std::string, nn::Module*>> with_weight_;  // those attached to
  std::vector<ModuleRecord> seen_;
};

}  // namespace phalanx::train
