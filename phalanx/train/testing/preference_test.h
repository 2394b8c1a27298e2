// Tests of runs that tune on preferences ([dpo]): a tokenizer with a chat template,
// files of preferences, and configurations.
#pragma once

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/data/tokenizer/bpe_trainer.h"
#include "phalanx/train/testing/trainer_test_support.h"

namespace phalanx::train {

class PreferenceTest : public TrainerTest {
 protected:
  static constexpr const char* kTemplate =
      "{% for m in messages %}{{ m.role + ':' + m.content + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ "
      "'assistant:' }}{% endif %}";

  PreferenceTest() {
    data::BpeTrainer trainer({.vocab_size = 262, .special_tokens = {"<|end|>"}});
    trainer.add("user:What is the answer? assistant:The answer is");
    std::filesystem::create_directories(path("assets"));
    trainer.train().save(path("assets/tokenizer.json"));
    std::ofstream(path("assets/chat_template.jinja")) << kTemplate;
    write_preferences("preferences.jsonl", 20);
    write_preferences("held_out.jsonl", 5, 7);
  }

  void write_preferences(const std::string& name, int count, int from = 0) const {
    std::ofstream file(path(name));
    for (int i = from; i < from + count; ++i) {
      const std::string number = std::to_string(i * 37 % 101);
      file << nlohmann::json{{"prompt", "What is " + number + (i % 3 == 0 ? ", please?" : "?")},
                             {"chosen", "It is " + number + std::string(static_cast<std::size_t>(i % 5), '!')},
                             {"rejected", std::string(static_cast<std::size_t>(1 + i * 3 % 11), 'x') + number}}
                  .dump()
           << "\n";
    }
  }

  config::TrainConfig tune(const std::string& run, std::vector<std::string> more = {}) const {
    std::vector<std::string> flags = {"--model.flavor=debug",
                                      "--model.hf_assets_path=" + path("assets"),
                                      "--checkpoint.initial_random_weights",
                                      "--dpo.preferences=" + path("preferences.jsonl"),
                                      "--training.seq_len=256",
                                      "--training.local_batch_size=4",
                                      "--training.global_batch_size=4",
                                      "--training.steps=4",
                                      "--lr_scheduler.warmup_steps=0",
                                      "--optimizer.lr=2e-3",
                                      "--metrics.no-enable_tensorboard",
                                      "--checkpoint.interval=100",
                                      "--job.dump_folder=" + path(run)};
    flags.insert(flags.end(), more.begin(), more.end());
    return config::parse_config("", "test", flags);
  }
  config::TrainConfig tune_in(const Layout& layout, const std::string& run, std::vector<std::string> more = {}) const {
    std::vector<std::string> keys = {
        "--training.local_batch_size=" + std::to_string(4 * layout.tp * layout.pp * layout.cp / layout.ranks),
        "--parallelism.pipeline_parallel_degree=" + std::to_string(layout.pp),
        "--parallelism.context_parallel_degree=" + std::to_string(layout.cp),
        "--parallelism.tensor_parallel_degree=" + std::to_string(layout.tp)};
    keys.insert(keys.end(), layout.keys.begin(), layout.keys.end());
    keys.insert(keys.end(), more.begin(), more.end());
    return tune(run, std::move(keys));
  }
};

}  // namespace phalanx::train
