#include "phalanx/config/config.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>

#include "phalanx/base/temp_directory.h"
#include "phalanx/config/config_reader.h"
#include "phalanx/config/config_schema.h"
#include "phalanx/config/slot_text.h"
#include "phalanx/config/testing/parse.h"

namespace phalanx::config {
namespace {

TEST(Config, ReadsKeysOfEveryType) {
  const TrainConfig config = parse(R"(
[model]
flavor = "50M"
tie_embeddings = true
[training]
steps = 12
max_norm = 2
shuffle = false
[lr_scheduler]
warmup_steps = 3
decay_ratio = 0.25
decay_type = "cosine"
)");
  EXPECT_EQ(config.model.flavor, "50M");
  EXPECT_TRUE(*config.model.tie_embeddings);
  EXPECT_EQ(config.training.steps, 12);
  EXPECT_EQ(config.training.max_norm, 2.0);
  EXPECT_FALSE(config.training.shuffle);
  EXPECT_EQ(config.lr_scheduler.decay_ratio, 0.25);
  EXPECT_EQ(config.lr_scheduler.decay_type, "cosine");
}

TEST(Config, AMarkOfUtf8IsPassedOverAndUtf16IsRefused) {
  EXPECT_EQ(parse("\xEF\xBB\xBF[training]\nsteps = 12\n").training.steps, 12);
  EXPECT_THAT(refusal(std::string_view("\xFF\xFE[\0t\0", 6)), HasSubstr("run.toml: this is UTF-16LE text"));
}

TEST(Config, OverridesOverruleTheFileInTheirOrder) {
  const std::string file = "[training]\nsteps = 5\n[lr_scheduler]\nwarmup_steps = 0\n";
  EXPECT_EQ(parse(file, {"--training.steps", "7"}).training.steps, 7);
  EXPECT_EQ(parse(file, {"--training.steps=8"}).training.steps, 8);
  EXPECT_EQ(parse(file, {"--training.steps=8", "--training.steps", "9"}).training.steps, 9);
  EXPECT_EQ(parse(file, {"--training.global-batch-size", "-1"}).training.global_batch_size, -1);
  EXPECT_EQ(parse(file, {"--optimizer.lr", "3e-4"}).optimizer.lr, 3e-4);
  EXPECT_EQ(parse(file, {"--job.dump_folder="}).job.dump_folder, "");
}

TEST(Config, BooleansAreSwitchedByFlagAlone) {
  EXPECT_TRUE(parse("", {"--validation.enable"}).validation.enable);
  EXPECT_FALSE(parse("", {"--checkpoint.no-enable"}).checkpoint.enable);
  EXPECT_FALSE(parse("", {"--checkpoint.enable", "false"}).checkpoint.enable);
  EXPECT_FALSE(parse("", {"--checkpoint.enable=false", "--debug.seed", "3"}).checkpoint.enable);
  EXPECT_TRUE(parse("", {"--validation.enable", "--debug.seed", "3"}).validation.enable);
}

TEST(Config, PrintedConfigurationReadsBackTheSame) {
  EXPECT_EQ(parse(print_config(parse("", {"--optimizer.lr", "0.123456789012"}))).optimizer.lr, 0.123456789012);
  const TrainConfig config = parse("[model]\nn_layers = 3\n[job]\ndescription = \"a \\\"b\\\"\\n\\u0001 \\\\ c\"\n",
                                   {"--optimizer.lr", "0.1", "--lr_scheduler.decay_ratio", "0", "--debug.seed", "7",
                                    "--training.num_tokens_per_train_step", "32768"});
  const std::string printed = print_config(config);
  const TrainConfig again = parse(printed);
  EXPECT_EQ(print_config(again), printed);
  EXPECT_EQ(again.job.description, "a \"b\"\n\x01 \\ c");
  EXPECT_EQ(again.optimizer.lr, 0.1);
  EXPECT_EQ(again.lr_scheduler.decay_ratio, 0.0);
  EXPECT_EQ(again.training.global_batch_size, 16);
}

TEST(Config, ConversationsTakeThePlaceOfTokenFiles) {
  const std::string sft = "[sft]\nconversations = [\"a.jsonl\"]\n[model]\nhf_assets_path = \"m\"\n";
  const TrainConfig config = parse(sft);
  EXPECT_EQ(config.training.packing, "best_fit");
  EXPECT_EQ(config.training.attn_mask_type, "block_causal");
  EXPECT_EQ(print_config(parse(print_config(config))), print_config(config));
  EXPECT_EQ(parse(sft, {"--sft.conversations=a.jsonl,b.jsonl"}).sft.conversations,
            (std::vector<std::string>{"a.jsonl", "b.jsonl"}));
  EXPECT_EQ(parse("").training.packing, "none");
  EXPECT_THAT(refusal(sft + "[training]\npacking = \"none\"\n"),
              AllOf(HasSubstr("packing is \"none\""), HasSubstr("remove the two keys")));
  EXPECT_THAT(refusal(sft + "[training]\nattn_mask_type = \"causal\"\n"), HasSubstr("attn_mask_type \"causal\""));
  EXPECT_THAT(refusal(sft + "[training]\ndataset_path = \"x\"\n"),
              HasSubstr("[training] dataset_path is set beside [sft] conversations"));
  EXPECT_THAT(refusal(sft + "[validation]\nenable = true\ndataset_path = \"x\"\n"),
              HasSubstr("[sft] validation_conversations"));
  EXPECT_THAT(refusal("[sft]\nconversations = [\"a.jsonl\"]\n"), HasSubstr("[model] hf_assets_path"));
  EXPECT_THAT(refusal("[sft]\nchat_template = \"rag\"\n"), HasSubstr("chat_template is set, but conversations"));
  EXPECT_THAT(refusal(sft, {"--sft.validation_conversations=b.jsonl"}), HasSubstr("but [validation] enable is not"));
  EXPECT_THAT(refusal(sft, {"--sft.too_long=drop"}), HasSubstr("\"leave_out\""));
  const std::string held_out = "--sft.validation_conversations=b.jsonl";
  EXPECT_EQ(refusal(sft, {held_out, "--validation.enable", "--validation.fraction=0"}), "");
}

TEST(Config, StopSignalsAreNamedAndAreSignalsThatMayMeanToStop) {
  EXPECT_THAT(stop_signals(parse("")), ElementsAre(SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU));
  EXPECT_THAT(stop_signals(parse("", {"--checkpoint.stop_signals=SIGUSR1,SIGTERM"})), ElementsAre(SIGUSR1, SIGTERM));
  const std::pair<const char*, const char*> wrong[] = {{"SIGKILL", "[checkpoint] stop_signals names 'SIGKILL'"},
                                                       {"SIGSEGV", "expected some of SIGTERM, SIGINT, "},
                                                       {"SIGUSR3", "(did you mean 'SIGUSR1'?)"},
                                                       {"SIGQUIT", "SIGQUIT has the flight recorder written"}};
  for (const auto& [name, message] : wrong) {
    EXPECT_THAT(refusal(fmt::format("[checkpoint]\nstop_signals = [\"{}\"]\n", name)), HasSubstr(message));
  }
}

TEST(Config, UnknownKeysNameTheNearest) {
  EXPECT_THAT(refusal("[training]\n\nstep = 3\n"),
              AllOf(HasSubstr("run.toml:3:"), HasSubstr("[training] step"), HasSubstr("did you mean 'steps'?")));
  EXPECT_THAT(refusal("[trainin]\nsteps = 3\n"),
              AllOf(HasSubstr("run.toml:1:"), HasSubstr("did you mean 'training'?")));
  EXPECT_THAT(refusal("[foo]\nx = 3\n"), Not(HasSubstr("did you mean")));
  EXPECT_THAT(refusal("[training]\nlr = 3\n"), HasSubstr("did you mean [optimizer] lr?"));
  EXPECT_THAT(refusal("steps = 3\n"), HasSubstr("outside of any section"));
  EXPECT_THAT(refusal("", {"--training.stepz", "3"}),
              AllOf(HasSubstr("--training.stepz"), HasSubstr("did you mean 'steps'?")));
  EXPECT_THAT(refusal("", {"--trainin.steps", "3"}), HasSubstr("did you mean 'training'?"));
  EXPECT_THAT(refusal("", {"--training.stepz"}), HasSubstr("did you mean 'steps'?"));
}

TEST(Config, CountsThatNothingCanHoldAreRefused) {
  const std::string most = ", and at most 2147483647";
  for (const char* key : {"training.local_batch_size", "training.steps", "checkpoint.keep_latest_k",
                          "comm.train_timeout_seconds", "validation.local_batch_size", "model.n_layers"}) {
    EXPECT_THAT(refusal("", {fmt::format("--{}=2147483648", key)}), HasSubstr(most)) << key;
    EXPECT_THAT(refusal("", {fmt::format("--{}=9223372036854775807", key)}), HasSubstr(most)) << key;
    EXPECT_EQ(refusal("", {fmt::format("--{}=2147483647", key)}), "") << key;
  }
  EXPECT_EQ(refusal("", {"--debug.seed=9223372036854775807"}), "");
}

TEST(Config, AModelNumberOf0IsNotTakenForNoNumber) {
  EXPECT_THAT(refusal("[model]\nnorm_eps = 0\n"), HasSubstr("norm_eps is 0: expected a number from 1e-30 to 1"));
  EXPECT_THAT(refusal("", {"--model.norm_eps=1e-400"}), HasSubstr("expected a number from 1e-30 to 1"));
}

TEST(Config, WrongTypesNamePlaceExpectedAndFound) {
  EXPECT_THAT(
      refusal("[training]\nsteps = \"ten\"\n"),
      AllOf(HasSubstr("run.toml:2:"), HasSubstr("[training] steps is \"ten\""), HasSubstr("an integer, 1 or more")));
  EXPECT_THAT(refusal("[training]\nsteps = 1.5\n"), HasSubstr("is 1.5: expected an integer"));
  EXPECT_THAT(refusal("[training]\nsteps = 0\n"), HasSubstr("is 0: expected an integer, 1 or more"));
  EXPECT_THAT(refusal("[training]\nsteps = [1]\n"), HasSubstr("is a list"));
  EXPECT_THAT(refusal("[training]\nshuffle = 1\n"), HasSubstr("expected true or false"));
  EXPECT_THAT(refusal("[job]\ndescription = 1\n"), HasSubstr("expected a string"));
  EXPECT_THAT(refusal("[optimizer]\nlr = nan\n"), HasSubstr("expected a number, 0 or more"));
  EXPECT_THAT(refusal("[optimizer]\nname = \"adam\"\n"),
              HasSubstr("one of \"AdamW\", \"Lion\", \"SGD\", \"Muon\" (did you mean"));
  EXPECT_THAT(refusal("", {"--training.steps", "3x"}), HasSubstr("--training.steps: [training] steps is 3x"));
  EXPECT_THAT(refusal("", {"--training.steps", "99999999999999999999"}), HasSubstr("expected an integer"));
}

TEST(Config, ListsOfStrings) {
  const std::vector<std::string> both = {"*norm*", "*.bias"};
  EXPECT_EQ(parse("[optimizer]\nno_decay = [\"*norm*\", \"*.bias\"]\n").optimizer.no_decay, both);
  EXPECT_TRUE(parse("[optimizer]\nno_decay = []\n").optimizer.no_decay.empty());
  for (const char* flag : {"*norm*,*.bias", "[\"*norm*\", '*.bias']", "*norm*, *.bias,"}) {
    EXPECT_EQ(parse("", {"--optimizer.no_decay", flag}).optimizer.no_decay, both) << flag;
  }
  EXPECT_TRUE(parse("[optimizer]\nno_decay = [\"a\"]\n", {"--optimizer.no_decay="}).optimizer.no_decay.empty());
  EXPECT_THAT(print_config(parse("", {"--optimizer.no_decay=*norm*,*.bias"})),
              HasSubstr("no_decay = [\"*norm*\", \"*.bias\"]\n"));
  EXPECT_THAT(refusal("[optimizer]\nno_decay = \"*norm*\"\n"),
              HasSubstr("[optimizer] no_decay is \"*norm*\": expected a list of strings"));
  EXPECT_THAT(refusal("[optimizer]\nno_decay = [1]\n"), HasSubstr("expected a list of strings"));
}

TEST(Config, KeysOfShardedTraining) {
  const std::string shards = "[parallelism]\ndata_parallel_shard_degree = -1\n";
  const auto after_forward = [&](const std::string& value) {
    return parse(shards + "fsdp_reshard_after_forward = " + value + "\n").parallelism.fsdp_reshard_after_forward;
  };
  EXPECT_EQ(after_forward("\"never\""), "never");
  EXPECT_EQ(after_forward("2"), "2");
  EXPECT_EQ(after_forward("\"2\""), "2");
  const TrainConfig grouped = parse(shards, {"--parallelism.fsdp_reshard_after_forward", "2"});
  EXPECT_EQ(reshard_group(grouped), 2);
  EXPECT_EQ(reshard_group(parse(shards)), 0);
  EXPECT_EQ(reshard_group(parse(print_config(grouped))), 2);
  EXPECT_THAT(refusal(shards + "fsdp_reshard_after_forward = 0\n"),
              HasSubstr("is 0: expected one of \"default\", \"always\", \"never\", or a number of ranks"));
  EXPECT_THAT(refusal(shards + "fsdp_reshard_after_forward = \"newer\"\n"), HasSubstr("or a number of ranks"));

  EXPECT_NO_THROW(parse(shards + "[training]\nmixed_precision_param = \"bfloat16\"\nenable_cpu_offload = true\n"
                                 "mixed_precision_reduce = \"bfloat16\"\n"));
  for (const char* flag : {"--training.enable_cpu_offload", "--training.mixed_precision_reduce=bfloat16",
                           "--parallelism.fsdp_reshard_after_forward=2"}) {
    EXPECT_THAT(refusal("", {flag}), HasSubstr("is for sharded training: set [parallelism] data_parallel_shard_degree"))
        << flag;
  }
  EXPECT_THAT(refusal(shards + "zero_stage = 2\nfsdp_reshard_after_forward = 2\n"),
              HasSubstr("fsdp_reshard_after_forward = 2 is for zero_stage = 3, but that is 2"));
}

TEST(Config, WhenAccumulatedGradientsAreReduced) {
  const std::string shards = "[parallelism]\ndata_parallel_shard_degree = -1\n";
  const auto each = [&](const std::string& more) { return reduces_each_microbatch(parse(shards + more)); };
  EXPECT_TRUE(each(""));
  EXPECT_TRUE(each("zero_stage = 2\nfsdp_reduce_each_microbatch = \"always\"\n"));
  EXPECT_FALSE(each("zero_stage = 1\n"));
  EXPECT_FALSE(each("fsdp_reduce_each_microbatch = \"never\"\n"));
  EXPECT_FALSE(each("pipeline_parallel_degree = 2\n"));
  EXPECT_THAT(refusal(shards + "zero_stage = 1\nfsdp_reduce_each_microbatch = \"always\"\n"),
              HasSubstr("is for zero_stage = 2 or 3 without a pipeline, but zero_stage = 1: gradients stay whole"));
  EXPECT_THAT(refusal(shards + "pipeline_parallel_degree = 2\nfsdp_reduce_each_microbatch = \"always\"\n"),
              HasSubstr("but pipeline_parallel_degree = 2: gradients stay whole until the step ends"));
  EXPECT_THAT(refusal("", {"--parallelism.fsdp_reduce_each_microbatch=never"}), HasSubstr("is for sharded training"));
  EXPECT_THAT(refusal("", {"--debug.replica_check_freq=-1"}), HasSubstr("replica_check_freq"));
}

TEST(Config, ValuesOutOfRangeAreRefused) {
  EXPECT_THAT(refusal("[optimizer]\nbeta1 = 1.5\n"), HasSubstr("is 1.5: expected a number from 0 to 1"));
  EXPECT_THAT(refusal("[validation]\nfraction = 0.95\n"), HasSubstr("expected a number from 0 to 0.9"));
  EXPECT_THAT(refusal("[lr_scheduler]\nmin_lr_factor = 2\n"), HasSubstr("expected a number from 0 to 1"));
  EXPECT_THAT(refusal("[optimizer]\nlr = -1\n"), HasSubstr("expected a number, 0 or more"));
  for (const char* key : {"[metrics]\nlog_freq", "[checkpoint]\ninterval", "[validation]\nfreq", "[training]\nsteps"}) {
    EXPECT_THAT(refusal(std::string(key) + " = 0\n"), HasSubstr("1 or more")) << key;
  }
  for (const char* key : {"[training]\nglobal_batch_size", "[parallelism]\ndata_parallel_replicate_degree",
                          "[validation]\nlocal_batch_size", "[validation]\nsteps"}) {
    EXPECT_THAT(refusal(std::string(key) + " = 0\n"), HasSubstr("is 0: expected -1, or 1 or more")) << key;
    EXPECT_THAT(refusal(std::string(key) + " = -2\n"), HasSubstr("is -2: expected an integer")) << key;
  }
}

TEST(Config, KeysThatNeedEachOtherAreRefusedAlone) {
  EXPECT_THAT(refusal("[checkpoint]\ninitial_load_in_hf = true\n"),
              HasSubstr("neither initial_load_path nor [model] hf_assets_path is set"));
  EXPECT_THAT(refusal("[metrics]\nsample_prompt = \"x\"\n"), HasSubstr("hf_assets_path"));
  EXPECT_THAT(refusal("[validation]\nenable = true\nfraction = 0\n"), HasSubstr("nothing is held out"));
  EXPECT_NO_THROW(parse("[validation]\nenable = true\nfraction = 0\ndataset_path = \"t.bin\"\n"));
}

TEST(Config, MalformedTomlNamesLineAndColumn) {
  EXPECT_THAT(refusal("[training]\nsteps = \n"), AllOf(HasSubstr("run.toml:2:"), HasSubstr("not valid TOML")));
  EXPECT_THAT(refusal("[training\n"), HasSubstr("not valid TOML"));
}

TEST(Config, ActivationCheckpointing) {
  const auto every = [](const std::string& keys) { return recompute_every(parse("[activation_checkpoint]\n" + keys)); };
  EXPECT_EQ(every(""), 0);
  EXPECT_EQ(every("mode = \"full\"\n"), 1);
  EXPECT_EQ(every("mode = \"selective\"\n"), 2);
  EXPECT_EQ(every("mode = \"selective\"\nselective_ac_option = 3\n"), 3);
  EXPECT_EQ(every("mode = \"selective\"\nselective_ac_option = \"3\"\n"), 3);
  EXPECT_EQ(every("selective_ac_option = 3\n"), 0);
  const TrainConfig op = parse("[activation_checkpoint]\nmode = \"selective\"\nselective_ac_option = \"op\"\n");
  EXPECT_EQ(recompute_every(op), 1);
  EXPECT_TRUE(uses_op_sac(op));
  EXPECT_TRUE(uses_op_sac(parse(print_config(op))));
  EXPECT_FALSE(uses_op_sac(parse("[activation_checkpoint]\nmode = \"full\"\nselective_ac_option = \"op\"\n")));
  EXPECT_THAT(refusal("[activation_checkpoint]\nselective_ac_option = \"ops\"\n"),
              AllOf(HasSubstr("\"op\""), HasSubstr("or a number of blocks")));
  EXPECT_THAT(refusal("[activation_checkpoint]\nselective_ac_option = 0\n"), HasSubstr("or a number of blocks"));
}

TEST(Config, ProfilingAndCommunicationKeys) {
  const TrainConfig defaults = parse("");
  EXPECT_FALSE(defaults.profiling.enable_profiling);
  EXPECT_EQ(defaults.comm.trace_buf_size, 2048);
  const TrainConfig config = parse(
      "[job]\ndump_folder = \"out\"\n[profiling]\nenable_profiling = true\nprofile_freq = 5\nprofiler_active = 2\n"
      "[comm]\ntrace_buf_size = 0\nsave_traces_folder = \"/abs/traces\"\nsave_traces_file_prefix = \"r\"\n");
  EXPECT_TRUE(config.profiling.enable_profiling);
  EXPECT_EQ(in_dump_folder(config, config.profiling.save_traces_folder), "out/profile_traces");
  EXPECT_EQ(in_dump_folder(config, config.comm.save_traces_folder), "/abs/traces");
  EXPECT_EQ(config.comm.trace_buf_size, 0);
  EXPECT_EQ(config.comm.save_traces_file_prefix, "r");
  EXPECT_FALSE(defaults.comm.shared_heap);
  EXPECT_TRUE(parse("[comm]\nshared_heap = true\n").comm.shared_heap);
  EXPECT_FALSE(defaults.comm.strict);
  EXPECT_TRUE(parse("[comm]\nstrict = true\n").comm.strict);
  EXPECT_THAT(refusal("", {"--profiling.profile_freq=0"}), HasSubstr("expected an integer, 1 or more"));
  EXPECT_THAT(refusal("", {"--profiling.profiler_active=11"}),
              HasSubstr("profiler_active is 11, but profile_freq is 10"));
  EXPECT_THAT(refusal("", {"--profiling.profile_frequ=3"}), HasSubstr("did you mean 'profile_freq'?"));
  EXPECT_THAT(refusal("", {"--profiling.enable_memory_snapshot"}), HasSubstr("no memory snapshot"));
  EXPECT_THAT(refusal("", {"--comm.trace_buf_size=-1"}), HasSubstr("expected an integer from 0"));
  EXPECT_THAT(refusal("", {"--comm.save_traces_file_prefix=a/b"}), HasSubstr("the beginning of a file's name"));
}

TEST(Config, AllProblemsOfAFileAndItsFlagsAreOneReport) {
  const std::string text = refusal(
      "[model]\nprint_after_conversion = true\n[training]\nsteps = 0\nseqlen = 5\nmax_norm = inf\n[trainin]\nx = 1\n"
      "[parallelism]\ndata_parallel_shard_degree = 0\n[profiling]\nprofiler_active = 11\n",
      {"--optimizer.lr=fast", "--comm.save_traces_file_prefix=a/b"});
  for (const char* problem :
       {"run.toml: 9 problems\n", "run.toml:2: [model] print_after_conversion = true is not supported",
        "run.toml:4: [training] steps is 0: expected an integer, 1 or more",
        "run.toml:5: unknown key [training] seqlen",
        "run.toml:6: [training] max_norm is inf: expected a number, 0 or more, and not infinite",
        "unknown section [trainin]", "data_parallel_shard_degree is 0", "--optimizer.lr: [optimizer] lr is fast",
        "[comm] save_traces_file_prefix is \"a/b\""}) {
    EXPECT_THAT(text, HasSubstr(problem));
  }
  EXPECT_THAT(text, HasSubstr("profiler_active is 11, but profile_freq is 10"));
  // A key that was rejected causes no second problem.
  EXPECT_THAT(refusal("[profiling]\nprofiler_active = 11\nprofile_freq = \"often\"\n"),
              Not(HasSubstr("but profile_freq is 10")));
}

TEST(Config, NumbersThatFloat32DoesNotHoldAreRefused) {
  for (const char* flag : {"--optimizer.lr=1e39", "--training.max_norm=1e39", "--optimizer.weight_decay=3.5e38"}) {
    EXPECT_THAT(refusal("", {flag}), HasSubstr("and not above 3.4e38, where float32 ends")) << flag;
  }
  EXPECT_NO_THROW(parse("[optimizer]\nlr = 3e38\n"));
}

TEST(Config, InfiniteNumbersAreRefusedInEveryKey) {
  for (const Key& key : known_keys()) {
    TrainConfig config;
    if (type_name(key.slot(config)) != "number") continue;
    for (const char* value : {"inf", "-inf", "nan"}) {
      EXPECT_THAT(refusal("", {"--" + std::string(key.section) + "." + std::string(key.name) + "=" + value}),
                  HasSubstr(std::string("is ") + value + ": expected a number"))
          << key.name;
    }
  }
}

TEST(Config, KernelsAreRecordedInTracedStepsAlone) {
  EXPECT_THAT(notes_of("[profiling]\nrecord_kernels = true\n"),
              ElementsAre("[profiling] record_kernels has no effect: enable_profiling is not set"));
  EXPECT_THAT(notes_of("[profiling]\nrecord_kernels = true\nenable_profiling = true\n"), SizeIs(0));
}

TEST(Config, AFlagThatIsGivenTwiceIsSaid) {
  EXPECT_THAT(notes_of("", {"--training.steps", "3", "--training.steps=4"}),
              ElementsAre("given twice: --training.steps 3 and --training.steps 4: the last one, 4, counts"));
  EXPECT_THAT(notes_of("", {"--training.seed", "3", "--debug.seed", "4"}),
              ElementsAre("given twice: --training.seed 3 and --debug.seed 4: the last one, 4, counts"));
  EXPECT_TRUE(notes_of("[training]\nsteps = 2\n", {"--training.steps=3", "--training.steps", "3"}).empty());
}

TEST(Config, EveryNameOfATypeMeansTheSame) {
  for (const auto& [written, meant] : {std::pair{"bf16", "bfloat16"},
                                       {"fp16", "float16"},
                                       {"half", "float16"},
                                       {"fp32", "float32"},
                                       {"float", "float32"},
                                       {"bfloat16", "bfloat16"}}) {
    EXPECT_EQ(
        parse("[training]\nmixed_precision_param = \"" + std::string(written) + "\"\n").training.mixed_precision_param,
        meant);
  }
  EXPECT_THAT(refusal("[training]\nmixed_precision_param = \"f64\"\n"), HasSubstr("is \"f64\": expected one of"));
}

TEST(Config, TokenBudgetsGiveBatchSizes) {
  const TrainConfig config = parse(
      "[training]\nseq_len = 128\nnum_tokens_per_microbatch_per_dp_rank = 512\nnum_tokens_per_train_step = 2048\n");
  EXPECT_EQ(config.training.local_batch_size, 4);
  EXPECT_EQ(config.training.global_batch_size, 16);
  EXPECT_THAT(refusal("[training]\nseq_len = 128\nnum_tokens_per_microbatch_per_dp_rank = 0\n"),
              HasSubstr("multiple of seq_len 128"));
  EXPECT_THAT(refusal("[training]\nseq_len = 128\nnum_tokens_per_train_step = 200\n"),
              AllOf(HasSubstr("multiple of seq_len 128"), HasSubstr("such as 128")));
}

TEST(Config, StrayArgumentsAreUsageErrors) {
  EXPECT_THAT(refusal<UsageError>("", {"steps"}), HasSubstr("unexpected argument 'steps'"));
  EXPECT_THAT(refusal<UsageError>("", {"--training.steps"}), HasSubstr("needs a value"));
}

TEST(Config, MissingFileIsOneClearError) {
  try {
    read_config("/nonexistent/run.toml", {});
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("/nonexistent/run.toml"), HasSubstr("No such file")));
  }
  EXPECT_THROW(read_config(::testing::TempDir(), {}), ConfigError);
  // Only the first reader would get the text; the others would find nothing and use the defaults.
  const TempDirectory folder;
  const std::string pipe = (folder.path() / "run.toml").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(error_text<ConfigError>([&] { read_config(pipe, {}); }),
              AllOf(HasSubstr(pipe), HasSubstr("it is a pipe"), HasSubstr("write it to a file first")));
}

TEST(ConfigReference, HasEveryKey) {
  const std::string page = config_reference();
  for (const Key& key : known_keys()) {
    EXPECT_THAT(page, HasSubstr("| `" + std::string(key.name) + "` |"));
    EXPECT_FALSE(key.help.empty());
  }
  EXPECT_THAT(page, HasSubstr("`[metrics] enable_wandb`"));
}

}  // namespace
}  // namespace phalanx::config
