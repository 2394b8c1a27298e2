// Describes a run in words and in JSON: the lines at its start, the report's table, run.json, a checkpoint's metadata.
#pragma once

#include <c10/core/Device.h>

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/config/run_plan.h"
#include "phalanx/train/device_info.h"
#include "phalanx/train/model/parallel_model.h"
#include "phalanx/train/training_data.h"

namespace phalanx::train {

using DescriptionLines = std::vector<std::pair<std::string, std::string>>;

/// The parts of a run.
/// REQUIRES: they outlive this object.
struct RunParts {
  const config::TrainConfig& config;
  const config::RunPlan& plan;
  const Communicator& world;
  c10::Device device;
  const DeviceInfo& device_info;
  const ParallelModel& model;
  const TrainingData& data;
  const DescriptionLines& more;  // lines from the caller that started the run
};

DescriptionLines describe_run(const RunParts& run);
/// The contents of run.json from the start of the run on. The lines are its "environment".
nlohmann::json run_record(const RunParts& run, const DescriptionLines& lines);

/// {"model": {...}, "hf_assets_path": ..., "run": {...}}: enough to build the model again and to know what the state
/// belongs to (run_identity.h).
nlohmann::json checkpoint_metadata(const models::LlamaConfig& model, const config::TrainConfig& config,
                                   const nlohmann::json& identity);

}  // namespace phalanx::train
