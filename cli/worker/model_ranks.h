// The ranks that run a model together, for the workers of `phalanx generate` and `phalanx eval`.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/infer/model_files.h"
#include "phalanx/launch/process_context.h"
#include "phalanx/mesh/device_mesh.h"

namespace phalanx::cli {

struct ModelRanksOptions {
  std::int64_t tp = 1, pp = 1;
  std::string device;  // cpu, cuda, cuda:N; empty: cuda where there is one
  std::string backend = "auto";
  std::vector<std::string> arguments;  // of the command: the same on all ranks, or an error on all
};

struct ModelRanks {
  ProcessContext process;  // of a process alone: without a world
  ParallelPlan plan;
  std::optional<DeviceMesh> mesh;
  std::shared_ptr<Communicator> copy;    // the ranks that have one copy of the model; null: one rank
  std::shared_ptr<Communicator> stages;  // of them, those with the same part of each matrix; null: one

  int member() const;  // which copy of the model
  int members() const { return static_cast<int>(plan.data_parallel_size()); }
  bool leads() const { return !copy || copy->rank() == 0; }  // of its copy
  bool is_first() const { return process.rank == 0; }

  /// Of the leader, to all ranks of its copy.
  std::string from_leader(std::string bytes) const { return copy ? copy->broadcast_bytes(std::move(bytes)) : bytes; }
  void barrier() const;
  /// Of all ranks, on all.
  std::vector<std::string> all_gather(const std::string& bytes) const;
  /// Work that each rank does for itself, and that sends nothing: what fails on one is the same error on all.
  void each(const std::function<void()>& work) const;
  /// Collective: ConfigError where not all ranks have the same of `what`, an object.
  void require_same(const std::string& what, const nlohmann::json& mine) const;
  /// Runs `body`; an exception becomes the error of all ranks.
  void run(const std::function<void()>& body) const;
};

/// Collective over the ranks that a launcher has started, of which tp x pp make a copy (rank_launch.h); without one
/// this process is alone, and nothing is logged.
ModelRanks start_model_ranks(const ModelRanksOptions& options);

/// The contents of a file that each of the ranks reads for itself. DataError where that is a pipe and there are
/// several.
std::string read_on_each_rank(const std::string& path);

/// Collective: all ranks must have found the same model, of the same step, by its content.
std::shared_ptr<models::Llama> load_model(const infer::ModelFiles& files, const ModelRanks& ranks,
                                          const std::string& dtype);

}  // namespace phalanx::cli
