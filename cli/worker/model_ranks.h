// ModelRanks: the ranks that run a model together, for the workers of `phalanx generate` and `phalanx eval`.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/model_arguments.h"
#include "phalanx/infer/model_files.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/mesh/device_mesh.h"

namespace phalanx::cli {

struct ModelRanks {
  ProcessContext process;  // without a world if this process is the only rank
  ParallelPlan plan;
  std::optional<DeviceMesh> mesh;
  std::shared_ptr<Communicator> copy;    // the ranks of this copy of the model; null: one rank
  std::shared_ptr<Communicator> stages;  // the ranks of `copy` with the same tensor-parallel shard; null: one rank

  int member() const;  // the index of this rank's copy of the model
  int members() const { return static_cast<int>(plan.data_parallel_size()); }
  bool leads() const { return !copy || copy->rank() == 0; }  // this rank is the leader of its copy
  bool is_first() const { return process.rank == 0; }

  /// The leader's bytes, on all ranks of its copy.
  std::string from_leader(std::string bytes) const { return copy ? copy->broadcast_bytes(std::move(bytes)) : bytes; }
  void barrier() const;
  /// The bytes of all ranks, on all ranks.
  std::vector<std::string> all_gather(const std::string& bytes) const;
  /// Runs `work` on each rank. If it fails on one rank, all ranks throw the same error.
  /// REQUIRES: `work` does not communicate.
  void each(const std::function<void()>& work) const;
  /// Collective. Throws ConfigError if the ranks do not have the same JSON object `mine`; the error calls it `what`.
  void require_same(const std::string& what, const nlohmann::json& mine) const;
  /// Runs `body`; an exception becomes the error of all ranks.
  void run(const std::function<void()>& body) const;
};

/// Collective over the ranks that a launcher has started; tp x pp ranks form a copy of the model (rank_launch.h).
/// Without a launcher this process is the only rank, and nothing is logged. `arguments`, the command's, must be the
/// same on all ranks, else all ranks throw.
ModelRanks start_model_ranks(const ModelArguments& options, const Arguments& arguments);

/// The contents of a file that each rank reads itself. Throws DataError if the file is a pipe and there are several
/// ranks.
std::string read_on_each_rank(const std::string& path);

/// The model of --checkpoint, with the adapter of --adapter.
infer::ModelFiles find_model(const ModelArguments& options);

/// Collective. All ranks must have the same model content of the same step.
std::shared_ptr<models::Llama> load_model(const infer::ModelFiles& files, const ModelRanks& ranks,
                                          const std::string& dtype);

}  // namespace phalanx::cli
