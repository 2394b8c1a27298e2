// The memory of a training run: predicted and held against what there is before anything is allocated, counted while it
// trains, and explained where it runs out all the same. docs/memory.md.
//
//   RunMemory memory(config, plan, world, device, /*resumes=*/false);   // counts from here on
//   memory.check();                                     // MemoryError on every rank, with the same text
//   memory.explain_failures([&] { train(); });
//   for (const std::string& line : memory.finish(held).lines) log::info(line);
//
// Collective: the constructor, check() and finish(). The counters are the process's: where ranks are threads of one,
// each is given its part of their sum.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/config/run_plan.h"
#include "phalanx/observe/memory_counters.h"
#include "phalanx/plan/memory_fit.h"

namespace phalanx::train {

/// training_shape.h's, with what is known where it runs.
plan::TrainingShape training_shape(const TrainConfig& config, const RunPlan& plan, const Communicator& world,
                                   c10::Device device, bool resumes);

/// Of a card, the same to ranks that see different ones: `visible` is CUDA_VISIBLE_DEVICES, empty if it is not set.
std::string card_name(c10::Device device, std::string_view visible);

/// Of an allocation that failed: libtorch's and the standard library's exceptions, and ours where shared memory or a
/// thread could not be had.
bool is_memory_failure(const std::exception& error);

class RunMemory {
 public:
  /// `root` replaces "/" where the limits are read, for tests (base/memory_limits.h).
  RunMemory(const TrainConfig& config, const RunPlan& plan, std::shared_ptr<Communicator> world, c10::Device device,
            bool resumes, std::filesystem::path root = "/");

  const plan::TrainingMemory& predicted() const noexcept { return predicted_; }
  /// What limits any rank, as it was at the beginning.
  struct RankLimits {
    std::string process;  // ranks of the same one are its threads
    std::vector<plan::LimitOfRanks> limits;
  };

  /// Throws MemoryError if some rank has not enough; not if memory.check is off.
  void check() const;
  /// Runs it. What is thrown because an allocation failed becomes a MemoryError that says what is missing.
  void explain_failures(const std::function<void()>& body) const;

  /// The peak of every rank, for people and for run.json. `held` (on a device only, whose allocator knows no purposes)
  /// is what this rank holds by category, activations left out.
  struct Report {
    std::vector<std::string> lines;  // rank 0 only
    std::shared_ptr<nlohmann::json> record;
  };
  Report finish(const observe::MemoryCounts& held) const;

 private:
  std::vector<RankLimits> exchange_limits() const;
  std::optional<std::pair<std::size_t, plan::MemoryShortage>> worst_shortage(const plan::TrainingMemory& memory) const;
  std::string remedies_text(const std::function<bool(const plan::TrainingMemory&)>& fits) const;
  observe::MemoryCounts peak(const observe::MemoryCounts& held) const;

  bool checks_;
  std::shared_ptr<Communicator> world_;
  c10::Device device_;
  std::filesystem::path root_;
  plan::TrainingShape shape_;
  plan::TrainingMemory predicted_;
  std::vector<RankLimits> ranks_;
  int ranks_in_process_ = 1;
};

}  // namespace phalanx::train
