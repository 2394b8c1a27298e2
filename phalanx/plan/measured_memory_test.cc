// Compares the memory of a few real training steps, on ranks that are processes with shared memory, with the formulas
// and the prediction.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randint.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "phalanx/comm/backends/local_shm/shm.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/config/frozen_parameters.h"
#include "phalanx/models/llama.h"
#include "phalanx/models/lora.h"
#include "phalanx/nn/dropout.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/parallel/activation_checkpoint.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/plan/memory_model.h"
#include "phalanx/store/tcp_store.h"
#include "phalanx/tensor/counting_allocator.h"
#include "phalanx/tensor/host_block_pool.h"

namespace phalanx::plan {
namespace {

using observe::MemoryCategory;
using observe::MemoryCounts;

struct Layout {
  std::string name;
  int stage = 0;  // 0: DistributedDataParallel
  bool reshard = true;
  int replicas = 1;
  bool narrow = false;  // parameters of 16 bits
  bool masters = true;  // of these, in float32
  bool narrow_moments = false;
  bool sums_wide = false;  // sharded gradients in float32
  std::int64_t recompute_every = 0;
  bool uses_op_sac = false;
  int micro_batches = 1;
  bool defers = false;  // reduction, to the last of them
  std::int64_t batch = 4, seq = 128;
  int steps = 1;
  models::LoraOptions lora = {};
  std::vector<std::string> frozen = {};  // patterns
};

struct Measured {
  MemoryCounts state;  // when gradients are there, and activations are not
  MemoryCounts peak;
  std::int64_t pss = 0;  // more than before, with the state alone
};

using models::LlamaFamily;

models::LlamaConfig small_llama(bool tied = false, LlamaFamily family = LlamaFamily::llama) {
  models::LlamaConfig model = models::llama_flavor("5M");
  model.family = family;
  if (family == LlamaFamily::gpt2) model.n_kv_heads = model.n_heads;
  if (family == LlamaFamily::qwen3) model.own_head_dim = 96;
  if (family == LlamaFamily::mistral) model.sliding_window = 48;
  if (family == LlamaFamily::gemma3_text) model.own_head_dim = 96, model.query_scalar = 80;
  if (family == LlamaFamily::mixtral) {
    model.experts = 4;
    model.experts_per_token = 2;
  }
  model.vocab_size = 2048;
  model.tie_embeddings = tied;
  return model;
}

TrainingShape shape_of(const Layout& layout, const models::LlamaConfig& model, int ranks) {
  TrainingShape shape{.model = model, .batch = layout.batch, .seq = layout.seq};
  shape.replicas = layout.stage == 0 ? ranks : layout.replicas;
  shape.shards = ranks / shape.replicas;
  shape.zero_stage = layout.stage == 0 ? 3 : layout.stage;
  shape.reshard_after_forward = layout.reshard;
  shape.recompute_every = layout.recompute_every;
  shape.uses_op_sac = layout.uses_op_sac;
  shape.accumulates = layout.micro_batches > 1;
  shape.reduces_each_microbatch = !layout.defers;
  if (layout.narrow) shape.weight_bytes = shape.gather_bytes = shape.reduce_bytes = 2;
  if (layout.sums_wide) shape.reduce_bytes = 4;
  shape.master_weights = layout.masters;
  shape.narrow_copies = layout.narrow_moments ? 2 : 0;
  shape.shares_memory = ranks > 1;
  shape.lora = layout.lora;
  shape.frozen = models::frozen_parameters(model, layout.frozen, layout.lora);
  return shape;
}

/// The PSS without file mappings: how much of libtorch's code counts here depends on which other processes run it.
std::int64_t pss_without_files() {
  std::int64_t sum = 0;
  std::ifstream rollup("/proc/self/smaps_rollup");
  for (std::string line; std::getline(rollup, line);) {
    if (!line.starts_with("Pss_Anon:") && !line.starts_with("Pss_Shmem:")) continue;
    sum += std::stoll(line.substr(line.find_first_of("0123456789"))) * 1024;
  }
  return sum;  // 0 on kernels before 5.9
}

/// PSS of memory in use. Freed memory that the allocator still holds is returned first. All ranks wait meanwhile,
/// because a page of two ranks counts half only when both have touched it.
std::int64_t own_pss(Communicator& world) {
  ::malloc_trim(0);
  HostBlockPool::instance().trim();
  world.barrier();
  const std::int64_t pss = pss_without_files();
  world.barrier();
  return pss;
}

MemoryCounts operator-(MemoryCounts a, const MemoryCounts& b) {
  for (std::size_t c = 0; c < observe::kMemoryCategories; ++c) a.bytes[c] -= b.bytes[c];
  a.shared -= b.shared;
  return a;
}

Measured train(const Layout& layout, const models::LlamaConfig& config, const std::shared_ptr<Communicator>& world) {
  const MemoryCounts before = observe::memory_allocated();
  const auto pss_before = own_pss(*world);
  observe::reset_peak_memory_stats();
  const auto dtype = layout.narrow ? at::kBFloat16 : at::kFloat;
  const bool sharded = layout.stage > 0;
  const bool narrow_base = layout.lora.base_dtype != "float32";
  auto model = std::make_shared<models::Llama>(
      config, nn::TensorOptionsOfModule{.dtype = narrow_base ? at::kBFloat16 : dtype, .without_memory = sharded});
  models::add_lora(*model, layout.lora, dtype);
  models::store_in_nf4(*model, layout.lora);
  if (narrow_base) models::use_narrow_base(*model, dtype);
  const auto frozen = models::frozen_parameters(config, layout.frozen, layout.lora);
  for (const NamedTensor& one : nn::named_parameters(*model)) {
    one.tensor.set_requires_grad(std::ranges::find(frozen, one.name) == frozen.end());
  }
  for (std::size_t i = 0; layout.recompute_every > 0 && i < model->layers.size(); ++i) {
    if (i % static_cast<std::size_t>(layout.recompute_every) != 0) continue;
    checkpoint_activations(*model->layers[i], layout.uses_op_sac ? kernels::CheckpointPolicy(op_sac_policy) : nullptr);
  }
  std::unique_ptr<DistributedDataParallel> ddp;
  std::unique_ptr<FullyShardedDataParallel> fsdp;
  if (sharded) {
    std::vector<MeshAxis> axes;
    if (layout.replicas > 1) axes.push_back({"dp_replicate", layout.replicas});
    axes.push_back({"dp_shard", world->size() / layout.replicas});
    fsdp = std::make_unique<FullyShardedDataParallel>(
        *model, DeviceMesh(world, axes),
        FullyShardOptions{.stage = layout.stage,
                          .reshard_after_forward = layout.reshard,
                          .reduce_dtype = layout.sums_wide ? std::optional(at::kFloat) : std::nullopt});
    fsdp->initialise(7);
  } else {
    nn::initialise(*model, 7);
    ddp = std::make_unique<DistributedDataParallel>(*model, world);
  }
  if (layout.lora.dropout > 0) nn::set_dropout_rng_state(*model, {.seed = 1});
  AdamW optimizer(sharded ? fsdp->trained_parameters() : ddp->parameters(),
                  {.master_weights = layout.masters,
                   .state_dtype = layout.narrow_moments ? at::kBFloat16 : at::kFloat,
                   .stochastic_rounding = layout.narrow_moments});
  Measured measured;
  for (int step = 0; step < layout.steps; ++step) {
    const at::Tensor tokens = at::randint(config.vocab_size, {layout.batch, layout.seq}, at::kLong);
    for (int part = 0; part < layout.micro_batches; ++part) {
      std::shared_ptr<void> held;
      if (part + 1 < layout.micro_batches && sharded) {
        if (layout.defers) {
          held = std::make_shared<FullyShardedDataParallel::NoSync>(fsdp->no_sync());
        } else {
          held = std::make_shared<FullyShardedDataParallel::NoAllReduce>(fsdp->no_all_reduce());
        }
      }
      model->loss(tokens, tokens).backward();
    }
    measured.state = observe::memory_allocated() - before;
    optimizer.step(1e-3);
    measured.pss = own_pss(*world) - pss_before;
    optimizer.zero_grad();
  }
  measured.peak = observe::max_memory_allocated() - before;
  return measured;
}

/// Runs in separate processes: shared memory is counted for each rank, and leftovers of one run do not hide what the
/// next one needs. Returns rank 0's result.
class Ranks {
 public:
  explicit Ranks(int ranks) : ranks_(ranks) {
    page_ = static_cast<Measured*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  }
  ~Ranks() { munmap(page_, kBytes); }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  Measured run(const Layout& layout, const models::LlamaConfig& config = small_llama()) {
    TcpStoreServer server;
    std::vector<pid_t> children;
    for (int rank = 0; rank < ranks_; ++rank) {
      const pid_t child = ::fork();
      if (child == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        int status = 0;
        try {
          at::set_num_threads(1);
          install_counting_allocator();
          TcpStore store(server.address());
          const auto world = make_shm_communicator(store, rank, ranks_);
          const Measured measured = train(layout, config, world);
          if (rank == 0) *page_ = measured;
          world->barrier();
        } catch (const std::exception& error) {
          fmt::print(stderr, "rank {}: {}\n", rank, error.what());
          status = 1;
        }
        ::_exit(status);
      }
      children.push_back(child);
    }
    for (const pid_t child : children) {
      int status = 0;
      ::waitpid(child, &status, 0);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << layout.name << ", status " << status;
    }
    return *page_;
  }

 private:
  static constexpr std::size_t kBytes = 4096;
  int ranks_;
  Measured* page_;
};

void expect_near(std::int64_t found, double expected, double tolerance, const std::string& what) {
  EXPECT_NEAR(static_cast<double>(found), expected, tolerance * expected) << what;
}

class MeasuredState : public ::testing::TestWithParam<int> {};

double formula(const Layout& layout, double p, double n) {
  switch (layout.stage) {
    case 0:
      return 16 * p;
    case 1:
      return layout.narrow ? 4 * p + 12 * p / n : 8 * p + 8 * p / n;
    case 2:
      return layout.narrow ? 2 * p + 14 * p / n : 4 * p + 12 * p / n;
    default:
      return 16 * p / n;
  }
}

// For either kind of parameters, with so few tokens that activations do not matter.
TEST_P(MeasuredState, IsThatOfTheFormulas) {
  const int n = GetParam();
  Ranks ranks(n);
  const auto model = small_llama();
  std::map<std::pair<bool, int>, Measured> all;
  for (const bool narrow : {false, true}) {
    for (const int stage : {0, 1, 2, 3}) {
      const Layout layout{.name = fmt::format("{} ranks, stage {}, {} bits", n, stage, narrow ? 16 : 32),
                          .stage = stage,
                          .narrow = narrow,
                          .batch = 1,
                          .seq = 32,
                          .steps = 1};
      const Measured measured = ranks.run(layout, model);
      const double expected = formula(layout, static_cast<double>(model.parameter_count()), n);
      expect_near(measured.state.state(), expected, 0.05, layout.name + ": " + measured.state.text());
      all[{narrow, stage}] = measured;
    }
  }
  // The kernel agrees: compared with data parallelism, rank 0 has fewer pages by the same amount. Memory outside of
  // tensors (libtorch's own buffers, gaps in the heap) differs from run to run.
  if (pss_without_files() == 0) return;
  const auto mebibytes = [](std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  for (const auto& [kind, measured] : all) {
    const Measured& whole = all[{kind.first, 0}];
    const double counted = mebibytes(whole.state.total() - measured.state.total());
    const double pages = mebibytes(whole.pss - measured.pss);
    fmt::print("{} ranks, stage {}, {} bits: {:.1f} MiB less counted, {:.1f} MiB less by PSS\n", n, kind.second,
               kind.first ? 16 : 32, counted, pages);
    EXPECT_NEAR(pages, counted, 0.05 * counted + 2);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, MeasuredState, ::testing::Values(2, 4));

struct PeakCase {
  Layout layout;
  int ranks = 2;
  bool tied = false;
  LlamaFamily family = LlamaFamily::llama;
};

class MeasuredPeak : public ::testing::TestWithParam<PeakCase> {};

TEST_P(MeasuredPeak, IsAsPredicted) {
  const auto& [layout, n, tied, family] = GetParam();
  auto model = small_llama(tied, family);
  if (layout.lora.base_dtype == "nf4") model.ffn_hidden = 704;  // whole blocks
  const Measured measured = Ranks(n).run(layout, model);
  const TrainingMemory predicted = predict_memory(shape_of(layout, model, n));
  const std::string text = fmt::format("measured {}\npredicted {}", measured.peak.text(), predicted.peak.text());
  // What a model saves of which a part is frozen depends on where that part is.
  const bool trains_all = layout.lora.rank == 0 && layout.frozen.empty();
  expect_near(measured.peak.total(), static_cast<double>(predicted.peak.total()), trains_all ? 0.02 : 0.06, text);
  const auto expect_category = [&](std::int64_t found, std::int64_t expected, std::string_view what) {
    EXPECT_NEAR(static_cast<double>(found), static_cast<double>(expected),
                (trains_all ? 0.05 : 0.1) * static_cast<double>(expected) + 3e5)
        << what << ": " << text;
  };
  const MemoryCounts &found = measured.peak, &expected = predicted.peak;
  for (const auto category : {MemoryCategory::parameters, MemoryCategory::optimizer, MemoryCategory::buffers}) {
    expect_category(found[category], expected[category], observe::name_of(category));
  }
  using enum MemoryCategory;
  if (n > 1 && layout.stage < 2) {
    expect_category(found[gradients], expected[gradients], "gradients");
    expect_category(found[activations], expected[activations], "activations");
  } else {
    // The backward pass makes gradients. A single rank's are known as such when they are complete. And if two moments
    // have about as much of both, either may be the peak.
    expect_category(found[gradients] + found[activations], expected[gradients] + expected[activations],
                    "what it makes");
  }
  EXPECT_NEAR(static_cast<double>(measured.peak.shared), static_cast<double>(predicted.peak.shared),
              0.02 * static_cast<double>(predicted.peak.shared) + 100'000)
      << text;
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, MeasuredPeak,
    ::testing::Values(
        PeakCase{{.name = "one_rank"}, 1}, PeakCase{{.name = "one_rank_recomputing", .recompute_every = 1}, 1},
        PeakCase{{.name = "one_rank_keeping_what_is_costly", .recompute_every = 1, .uses_op_sac = true}, 1},
        PeakCase{{.name = "ddp", .steps = 2}}, PeakCase{{.name = "zero2", .stage = 2}},
        PeakCase{{.name = "zero3", .stage = 3, .steps = 2}}, PeakCase{{.name = "zero3_tied", .stage = 3}, 2, true},
        PeakCase{{.name = "zero3_kept_gathered", .stage = 3, .reshard = false}},
        PeakCase{{.name = "zero3_accumulating", .stage = 3, .micro_batches = 2, .steps = 2}},
        PeakCase{{.name = "zero2_accumulating", .stage = 2, .micro_batches = 3}},
        PeakCase{{.name = "zero3_accumulating_tied", .stage = 3, .micro_batches = 2}, 2, true},
        PeakCase{{.name = "zero3_accumulating_recomputing", .stage = 3, .recompute_every = 1, .micro_batches = 2}},
        PeakCase{{.name = "zero3_deferring", .stage = 3, .micro_batches = 2, .defers = true}},
        PeakCase{{.name = "zero3_recomputing", .stage = 3, .recompute_every = 2}},
        PeakCase{{.name = "hsdp", .stage = 3, .replicas = 2}, 4},
        PeakCase{{.name = "zero3_narrow", .stage = 3, .narrow = true, .seq = 32}},
        PeakCase{{.name = "narrow_one_rank", .narrow = true, .masters = false, .narrow_moments = true, .seq = 32}, 1},
        PeakCase{{.name = "narrow_with_masters", .narrow = true, .narrow_moments = true, .seq = 32}, 1},
        PeakCase{{.name = "narrow_without_masters_ddp", .narrow = true, .masters = false, .seq = 32, .steps = 2}},
        PeakCase{{.name = "narrow_moments_zero3", .stage = 3, .narrow_moments = true, .steps = 2}},
        PeakCase{{.name = "narrow_zero3_summed_in_float32",
                  .stage = 3,
                  .narrow = true,
                  .masters = false,
                  .narrow_moments = true,
                  .sums_wide = true,
                  .seq = 32}},
        PeakCase{{.name = "lora_one_rank", .lora = {.rank = 8}}, 1},
        PeakCase{{.name = "lora_with_dropout", .lora = {.rank = 8, .dropout = 0.1}}, 1},
        PeakCase{{.name = "lora_of_attention", .lora = {.rank = 8, .target_modules = {"q_proj", "v_proj"}}}, 1},
        PeakCase{{.name = "lora_recomputing", .recompute_every = 1, .lora = {.rank = 8}}, 1},
        PeakCase{{.name = "lora_ddp", .steps = 2, .lora = {.rank = 8}}},
        PeakCase{{.name = "lora_zero3", .stage = 3, .steps = 2, .lora = {.rank = 8}}},
        PeakCase{{.name = "lora_on_bfloat16", .lora = {.rank = 8, .base_dtype = "bfloat16"}}, 1},
        PeakCase{{.name = "lora_on_bfloat16_recomputing",
                  .recompute_every = 1,
                  .lora = {.rank = 8, .base_dtype = "bfloat16"}},
                 1},
        PeakCase{
            {.name = "lora_on_bfloat16_zero3", .stage = 3, .steps = 2, .lora = {.rank = 8, .base_dtype = "bfloat16"}}},
        PeakCase{{.name = "lora_on_nf4", .lora = {.rank = 8, .base_dtype = "nf4"}}, 1},
        PeakCase{{.name = "lora_on_nf4_zero3", .stage = 3, .steps = 2, .lora = {.rank = 8, .base_dtype = "nf4"}}},
        PeakCase{{.name = "lora_zero1", .stage = 1, .lora = {.rank = 8}}},
        PeakCase{{.name = "lora_of_output", .lora = {.rank = 8, .target_modules = {"lm_head"}}}, 1},
        PeakCase{{.name = "lora_and_output_zero3",
                  .stage = 3,
                  .lora = {.rank = 8, .dropout = 0.1, .target_modules = {"all-linear", "lm_head"}}}},
        PeakCase{{.name = "lora_gpt2", .lora = {.rank = 8}}, 1, false, LlamaFamily::gpt2},
        PeakCase{{.name = "lora_gpt2_with_dropout_zero3", .stage = 3, .lora = {.rank = 8, .dropout = 0.1}},
                 2,
                 false,
                 LlamaFamily::gpt2},
        PeakCase{{.name = "lora_gpt2_attention", .lora = {.rank = 8, .target_modules = {"c_attn"}}},
                 1,
                 false,
                 LlamaFamily::gpt2},
        PeakCase{{.name = "lora_phi3", .lora = {.rank = 8}}, 1, false, LlamaFamily::phi3},
        PeakCase{{.name = "frozen_one_rank", .frozen = {"tok_embeddings*", "layers.[01].*"}}, 1},
        PeakCase{{.name = "frozen_ddp", .frozen = {"output*", "*attention*"}}},
        PeakCase{{.name = "frozen_zero3", .stage = 3, .frozen = {"tok_embeddings*", "*feed_forward.w[12]*"}}},
        PeakCase{{.name = "gpt2_one_rank"}, 1, true, LlamaFamily::gpt2},
        PeakCase{{.name = "gpt2_zero3", .stage = 3, .steps = 2}, 2, false, LlamaFamily::gpt2},
        PeakCase{{.name = "gpt2_recomputing", .stage = 2, .recompute_every = 1}, 2, false, LlamaFamily::gpt2},
        PeakCase{{.name = "mixtral_one_rank"}, 1, false, LlamaFamily::mixtral},
        PeakCase{{.name = "mixtral_zero3", .stage = 3, .steps = 2}, 2, false, LlamaFamily::mixtral},
        PeakCase{{.name = "mixtral_ddp", .steps = 2}, 2, true, LlamaFamily::mixtral},
        PeakCase{{.name = "mixtral_recomputing", .stage = 3, .recompute_every = 1}, 2, false, LlamaFamily::mixtral},
        PeakCase{{.name = "qwen3_zero3", .stage = 3, .steps = 2}, 2, true, LlamaFamily::qwen3},
        PeakCase{{.name = "qwen3_keeping_what_is_costly", .stage = 3, .recompute_every = 1, .uses_op_sac = true},
                 2,
                 true,
                 LlamaFamily::qwen3},
        PeakCase{{.name = "olmo2_one_rank"}, 1, false, LlamaFamily::olmo2},
        PeakCase{{.name = "olmo2_zero3", .stage = 3, .steps = 2}, 2, true, LlamaFamily::olmo2},
        PeakCase{{.name = "gemma3_one_rank"}, 1, true, LlamaFamily::gemma3_text},
        PeakCase{{.name = "gemma3_zero3", .stage = 3, .steps = 2}, 2, false, LlamaFamily::gemma3_text},
        PeakCase{{.name = "mistral_zero3", .stage = 3, .steps = 2}, 2, false, LlamaFamily::mistral},
        PeakCase{{.name = "mistral_keeping_what_is_costly", .stage = 3, .recompute_every = 1, .uses_op_sac = true},
                 2,
                 false,
                 LlamaFamily::mistral}),
    [](const auto& info) { return info.param.layout.name; });

}  // namespace
}  // namespace phalanx::plan
