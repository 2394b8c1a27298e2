#include "phalanx/config/torchtitan_keys.h"

#include <gtest/gtest.h>

#include "phalanx/config/testing/parse.h"

namespace phalanx::config::torchtitan_keys_test {
namespace {

TEST(TorchtitanKeys, KnownButUnsupportedKeysAreRefusedByNameWithTheReason) {
  EXPECT_THAT(refusal("[compile]\nenable = true\n"), AllOf(HasSubstr("[compile] enable"), HasSubstr("not supported")));
  EXPECT_THAT(refusal("[metrics]\nenable_wandb = true\n"), HasSubstr("[metrics] enable_wandb"));
  EXPECT_THAT(refusal("[parallelism]\nexpert_parallel_comm_backend = \"deepep\"\n"), HasSubstr("all-to-all"));
  EXPECT_THAT(refusal("[activation_checkpoint]\nearly_stop = true\n"), HasSubstr("computed again whole"));
  EXPECT_THAT(refusal("[checkpoint]\nasync_mode = \"async_with_pinned_mem\"\n"), HasSubstr("async_mode"));
  EXPECT_THAT(refusal("", {"--compile.enable"}), HasSubstr("[compile] enable"));
  EXPECT_THAT(refusal("[parallelism]\ncontext_parallel_load_balancer = \"heads\"\n"), HasSubstr("headtail"));
}

TEST(TorchtitanKeys, UnsupportedKeysAtTheirOffValueAreAccepted) {
  EXPECT_NO_THROW(
      parse("[compile]\nenable = false\n[parallelism]\ntensor_parallel_degree = 1\n"
            "[activation_checkpoint]\nmode = \"none\"\n[training]\ndtype = \"float32\"\n"
            "[metrics]\nenable_wandb = false\n[model]\nconverters = []\n",
            {"--checkpoint.async_mode", "disabled", "--compile.no-enable"}));
}

// The keys of torchtitan's own files of Llama 3.
TEST(TorchtitanKeys, TorchtitansLlamaFilesAreRead) {
  const TrainConfig config = parse(R"(
[job]
dump_folder = "./outputs"
print_args = false
use_for_integration_test = true
[profiling]
enable_profiling = false
save_traces_folder = "profile_trace"
enable_memory_snapshot = false
save_memory_snapshot_folder = "memory_snapshot"
with_stack = true
[metrics]
disable_color_printing = false
enable_wandb = false
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
[training]
local_batch_size = 1
seq_len = 8192
compile = false
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
context_parallel_degree = 1
context_parallel_rotate_method = "allgather"
[checkpoint]
enable = false
async_mode = "async_with_pinned_mem"
last_save_model_only = true
export_dtype = "bfloat16"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = false
components = ["model", "loss"]
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
filter_fqns = ["output"]
[fault_tolerance]
replica_id = 3
[validation]
enabled = false
dataset = "c4_validation"
freq = 5
)");
  EXPECT_EQ(config.model.name, "llama");
  EXPECT_EQ(config.model.flavor, "llama3_8b");
  EXPECT_FALSE(config.checkpoint.enable);
  EXPECT_EQ(config.checkpoint.async_mode, "disabled");
  for (const auto& [written, meant] :
       {std::pair{"debugmodel", "llama3_debug"}, {"70B", "llama3_70b"}, {"405B", "llama3_405b"}}) {
    EXPECT_EQ(parse("[model]\nflavor = \"" + std::string(written) + "\"\n").model.flavor, meant);
  }
  // Switched on, the same keys are refused.
  EXPECT_THAT(refusal("[compile]\nenable = true\ncomponents = [\"model\"]\n"),
              AllOf(HasSubstr("2 problems"), HasSubstr("[compile] components")));
  EXPECT_THAT(refusal("[validation]\nenable = true\ndataset = \"c4_validation\"\n"), HasSubstr("[validation] dataset"));
  EXPECT_THAT(refusal("[profiling]\nenable_profiling = false\nenable_memory_snapshot = true\n"),
              HasSubstr("enable_memory_snapshot"));
  EXPECT_THAT(refusal("[activation_checkpoint]\nmode = \"full\"\nearly_stop = true\n"), HasSubstr("early_stop"));
  EXPECT_NO_THROW(parse("[activation_checkpoint]\nmode = \"none\"\nearly_stop = true\n"));
}

TEST(TorchtitanKeys, TorchtitansOwnDefaultsAreAccepted) {
  for (const char* text :
       {"[job]\nprint_config = false\nprint_args = false\nconfig_file = \"\"\n", "[model]\ntokenizer_path = \"\"\n",
        "[training]\ngc_freq = 50\ngc_debug = false\n", "[optimizer]\nimplementation = \"fused\"\n",
        "[experimental]\ncustom_import = \"\"\ncustom_args_module = \"\"\n",
        "[activation_checkpoint]\nmode = \"full\"\nearly_stop = false\nmemory_budget = 0.5\npreserve_rng_state = true\n"
        "determinism_check = \"default\"\ndebug = false\nvisualize_memory_budget_pareto = false\n"
        "per_op_sac_force_recompute_mm_shapes_by_fqns = [\"moe.router.gate\"]\n",
        "[parallelism]\npipeline_parallel_schedule_csv = \"\"\npipeline_parallel_first_stage_less_layers = 1\n",
        "[training]\nseq_len = 64\n[validation]\nenable = true\nseq_len = 64\n",
        "[profiling]\nenable_profiling = true\nprofiler_warmup = 3\n",
        "[parallelism]\ncontext_parallel_load_balancer = \"headtail\"\nexpert_parallel_comm_backend = \"standard\"\n"
        "pipeline_parallel_expert_parallel_overlap = true\n",
        "[parallelism]\ncontext_parallel_load_balancer = \"ptrr\"\n",
        "[training.dataloader]\nnum_workers = 0\n[validation]\nenable = true\n[validation.dataloader]\n",
        "[checkpoint]\nlast_save_model_only = true\nenable_ft_dataloader_checkpoints = true\n",
        "[memory_estimation]\nenable = false\ndisable_fake_mode = false\n"}) {
    EXPECT_EQ(refusal(text), "") << text;
  }
  for (const RefusedKey& key : refused_keys()) {  // on the command line no section is off
    if (key.accepted.empty() || key.accepted == kAnyValue || key.name == "seq_len" || key.accepted.front() == '[')
      continue;
    EXPECT_EQ(refusal("", {fmt::format("--{}.{}={}", key.section, key.name, key.accepted)}), "") << key.name;
  }
  for (const char* flag : {"--compile.enable=false", "--float8.enable_fsdp_float8_all_gather=false",
                           "--memory_estimation.disable_fake_mode=false"}) {
    EXPECT_EQ(refusal("", {flag}), "") << flag;
  }
  EXPECT_THAT(refusal("[validation]\nenable = true\nseq_len = 64\n"),
              HasSubstr("validation uses training.seq_len, which is 2048"));
  EXPECT_THAT(refusal("[training]\ngc_freq = 5\n"), HasSubstr("set it to 50"));
}

TEST(TorchtitanKeys, SectionsThatAreOffRefuseNothingAndSayWhatIsNotRead) {
  const std::string text =
      "[validation]\nenable = false\nbogus = 3\nsteps = 0\n[profiling]\nenable_profiling = false\nexperimental_x = 1\n"
      "profile_freq = 0\nprofiler_active = 11\n[checkpoint]\nenable = false\nkeep_latest_k = -3\ninterval = 7\n"
      "[compile]\nenable = false\nfoo = 1\n";
  EXPECT_THAT(notes_of(text),
              ElementsAre(AllOf(
                  HasSubstr("not read, as their sections are switched off: "), HasSubstr("[validation] bogus"),
                  HasSubstr("[profiling] experimental_x, [profiling] profile_freq"),
                  HasSubstr("[checkpoint] keep_latest_k"), HasSubstr("[compile] foo"), Not(HasSubstr("interval")))));
  EXPECT_EQ(parse(text).checkpoint.keep_latest_k, 10);
  EXPECT_TRUE(notes_of("[validation]\nenable = false\nfreq = 5\n").empty());
  for (const auto& notes : {notes_of("[checkpoint]\nenable = false\nload_step = 3\n"),
                            notes_of("", {"--checkpoint.load_step=3", "--checkpoint.no-enable"})}) {
    EXPECT_THAT(notes, ElementsAre("not read, as its section is switched off: [checkpoint] load_step"));
  }
  EXPECT_TRUE(notes_of("[checkpoint]\nload_step = 3\n").empty());
  // Keys of a section that a flag switches on are read.
  EXPECT_THAT(refusal(text, {"--checkpoint.enable"}), HasSubstr("keep_latest_k is -3"));
  EXPECT_THAT(refusal(text, {"--validation.enable"}),
              AllOf(HasSubstr("unknown key [validation] bogus"), HasSubstr("steps is 0")));
}

TEST(TorchtitanKeys, AnAcceptedValueThatAsksForSomethingElseIsSaid) {
  EXPECT_THAT(notes_of("[checkpoint]\nlast_save_model_only = true\n"),
              ElementsAre(HasSubstr("[checkpoint] last_save_model_only = true has no effect: the last "
                                    "checkpoint is whole")));
  EXPECT_TRUE(notes_of("[checkpoint]\nlast_save_model_only = false\n").empty());
  EXPECT_TRUE(notes_of("[checkpoint]\nenable = false\nlast_save_model_only = true\n").empty());
}

TEST(TorchtitanKeys, LikeTorchtitanTakesItsDefaultsBelowFileAndFlags) {
  const TrainConfig ours = parse(""), theirs = parse("", {"--like", "torchtitan"});
  EXPECT_EQ(ours.training.mixed_precision_param, "float32");
  EXPECT_EQ(theirs.training.mixed_precision_param, "bfloat16");
  EXPECT_EQ(theirs.parallelism.data_parallel_shard_degree, -1);
  EXPECT_EQ(theirs.parallelism.data_parallel_replicate_degree, 1);
  EXPECT_EQ(recompute_every(theirs), 2);
  EXPECT_FALSE(theirs.checkpoint.enable);
  const TrainConfig changed = parse("[training]\nmixed_precision_param = \"fp16\"\n",
                                    {"--like=torchtitan", "--activation_checkpoint.mode=none"});
  EXPECT_EQ(changed.training.mixed_precision_param, "float16");
  EXPECT_EQ(recompute_every(changed), 0);
  EXPECT_THAT(refusal<UsageError>("", {"--like", "torchtitn"}), HasSubstr("did you mean 'torchtitan'?"));
  EXPECT_THAT(refusal<UsageError>("", {"--like"}), HasSubstr("--like is ''"));
}

TEST(TorchtitanKeys, OtherNamesOfAKeyMeanTheSame) {
  EXPECT_EQ(parse("[training]\nseed = 5\n").debug.seed, 5);
  EXPECT_THAT(refusal("[training]\nseed = 5\n[debug]\nseed = 6\n"), HasSubstr("[debug] seed again"));
}

}  // namespace
}  // namespace phalanx::config::torchtitan_keys_test
