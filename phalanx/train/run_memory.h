// RunMemory predicts the memory of a training run and compares it with what is available before anything is allocated.
// It counts memory while the run trains, and explains an allocation that fails nevertheless. See docs/memory.md.
//
//   RunMemory memory(config, plan, world, device, /*resumes=*/false);   // counts from here on
//   memory.check();                                     // MemoryError on every rank, with the same text
//   memory.explain_failures([&] { train(); });
//   for (const std::string& line : memory.finish(held).lines) log::info(line);
//
// The constructor, check() and finish() are collective. The counters belong to the process. If the ranks are threads of
// one process, each rank gets an equal share of the sum.
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

/// The shape of training_shape.h, completed with what is known where the run runs.
plan::TrainingShape training_shape(const config::TrainConfig& config, const config::RunPlan& plan,
                                   const Communicator& world, c10::Device device, bool resumes);

/// The name of a card, the same for ranks that see different sets of cards. `visible` is CUDA_VISIBLE_DEVICES; empty if
/// it is not set.
std::string card_name(c10::Device device, std::string_view visible);

/// Whether the error is a failed allocation: libtorch's and the standard library's exceptions, and Phalanx's own if
/// shared memory or a thread could not be had.
bool is_memory_failure(const std::exception& error);

class RunMemory {
 public:
  /// `root` replaces "/" where the limits are read, for tests (base/memory_limits.h).
  RunMemory(const config::TrainConfig& config, const config::RunPlan& plan, std::shared_ptr<Communicator> world,
            c10::Device device, bool resumes, std::filesystem::path root = "/");

  const plan::TrainingMemory& predicted() const noexcept { return predicted_; }
  /// The memory limits of a rank, as they were at the beginning.
  struct RankLimits {
    std::string process;  // ranks of the same one are its threads
    std::vector<plan::LimitOfRanks> limits;
  };

  /// Throws MemoryError if some rank does not have enough memory. Does nothing if memory.check is off.
  void check() const;
  /// Runs `body`. An exception because of a failed allocation becomes a MemoryError that says what is missing.
  void explain_failures(const std::function<void()>& body) const;

  /// The peak of every rank, for people and for run.json. `held` is what this rank holds by category, without
  /// activations; it is used only on a device, whose allocator does not know what memory is for.
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
