#include "cli/worker/generate_worker.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cli/generate_arguments.h"
#include "cli/worker/chat_end.h"
#include "cli/worker/model_ranks.h"
#include "phalanx/base/byte_order_mark.h"
#include "phalanx/base/derived_seed.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/file_kind.h"
#include "phalanx/base/folder_lock.h"
#include "phalanx/base/human.h"
#include "phalanx/base/json_lines.h"
#include "phalanx/base/log.h"
#include "phalanx/base/progress.h"
#include "phalanx/checkpoint/files/block_hash.h"
#include "phalanx/checkpoint/files/peft_adapter.h"
#include "phalanx/checkpoint/files/weights_identity.h"
#include "phalanx/data/chat/conversation.h"
#include "phalanx/data/chat/tokenized_conversation.h"
#include "phalanx/data/corpus/record_signs.h"
#include "phalanx/data/tokenizer/bpe_model.h"
#include "phalanx/data/tokenizer/bpe_tokenizer.h"
#include "phalanx/infer/generator.h"
#include "phalanx/infer/jobs/batch_job.h"
#include "phalanx/infer/model_files.h"
#include "phalanx/infer/stop_text.h"
#include "phalanx/infer/work_stealing_queue.h"
#include "phalanx/launch/rendezvous/job_identity.h"
#include "phalanx/models/config/llama_json.h"

namespace phalanx::cli {
namespace {

constexpr std::chrono::milliseconds kLook{200};  // how often the first rank checks the progress of all ranks

struct Inputs {
  infer::Prompts prompts;
  std::vector<data::Conversation> conversations;  // of --chat, one for each prompt
  std::string chat_ids;                           // of all conversations, as text
  std::string contents;                           // of the prompts file
  std::string tokenizer_hash;                     // empty: no tokenizer
};

/// Conversations become prompts without text; fill_chat_prompts() makes their ids when the tokenizer is there.
void take_conversations(Inputs& inputs, const GenerateArguments& arguments) {
  data::require_plain_text(inputs.contents, arguments.prompts_file, "conversations, as JSON lines");
  auto read = data::parse_conversations(inputs.contents, arguments.prompts_file,
                                        {.skips_malformed = arguments.format.skips_malformed, .trains = false});
  inputs.conversations = std::move(read.all);
  inputs.prompts.skipped = std::move(read.skipped);
  for (const data::Conversation& chat : inputs.conversations) {
    inputs.prompts.all.push_back({.id = chat.id.empty() ? std::to_string(chat.number) : chat.id,
                                  .text = {},
                                  .ids = {},
                                  .where = chat.where,
                                  .number = chat.number});
  }
  inputs.prompts.repeated = infer::repeated_ids(inputs.prompts.all);
}

/// Makes the ids of the conversations. One that the template refuses is left out, where malformed ones are.
void fill_chat_prompts(Inputs& inputs, const data::ConversationTokenizer& tokenize, bool skips_malformed) {
  std::vector<infer::Prompt> filled;
  for (std::size_t i = 0; i < inputs.conversations.size(); ++i) {
    try {
      const auto ids = tokenize.prompt(inputs.conversations[i]);
      inputs.prompts.all[i].ids.assign(ids.begin(), ids.end());
      filled.push_back(std::move(inputs.prompts.all[i]));
      inputs.chat_ids += fmt::format("{}\n", fmt::join(ids, ","));
    } catch (const DataError& error) {
      if (!skips_malformed) throw;
      inputs.prompts.skipped.emplace_back(error.what());
    }
  }
  inputs.prompts.all = std::move(filled);
  if (inputs.prompts.all.empty())
    throw DataError(no_line_left("--chat", "conversations to answer", inputs.prompts.skipped));
}

Inputs read_prompts(const GenerateArguments& arguments) {
  Inputs inputs;
  if (arguments.prompts_file.empty()) {
    for (const auto& text : arguments.prompts) {
      const std::size_t number = inputs.prompts.all.size();
      const std::string plain(without_utf8_mark(text));
      inputs.prompts.all.push_back({.id = std::to_string(number), .text = plain, .ids = {}, .number = number});
      inputs.contents += plain + '\n';
    }
    return inputs;
  }
  inputs.contents = read_on_each_rank(arguments.prompts_file);
  if (arguments.is_chat) {
    take_conversations(inputs, arguments);
    return inputs;
  }
  data::require_plain_text(inputs.contents, arguments.prompts_file, "prompts, one a line or as JSON lines");
  if (const auto looks = data::records_in(std::string_view(inputs.contents).substr(0, data::kRecordProbe));
      looks && !arguments.format.json_lines) {
    throw DataError(
        fmt::format("{} looks like {}: expected a prompt a line, or JSON lines in a file whose name ends in "
                    ".jsonl",
                    arguments.prompts_file, looks->what));
  }
  inputs.prompts = infer::parse_prompts(inputs.contents, arguments.prompts_file, arguments.format);
  return inputs;
}

void write_out(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) throw Error("cannot write to standard output");
}

/// The data that every mode of generation needs.
struct Task {
  const GenerateArguments& arguments;
  const infer::Prompts& prompts;
  const std::optional<data::BpeTokenizer>& tokenizer;
  const std::vector<std::int64_t>& end_tokens;

  infer::Request request(std::size_t number) const {
    const infer::Prompt& prompt = prompts.all[number];
    infer::Request request{.prompt = prompt.ids,
                           .max_new_tokens = arguments.max_new_tokens,
                           .sampling = arguments.sampling,
                           .stop_tokens = {},
                           .stop_strings = arguments.stops,
                           .where = prompt.where};
    request.sampling.seed = derived_seed(request.sampling.seed, prompt.number);
    if (prompt.text) {
      const auto ids = tokenizer->encode(*prompt.text, {.add_special_tokens = true});
      request.prompt.assign(ids.begin(), ids.end());
      // A document begins after an end-of-text token.
      if (request.prompt.empty() && !end_tokens.empty()) request.prompt.push_back(end_tokens.front());
    }
    if (!arguments.ignore_end) request.stop_tokens = end_tokens;
    return request;
  }

  nlohmann::ordered_json record(std::size_t number, const infer::Completion& completion) const {
    const infer::Prompt& prompt = prompts.all[number];
    nlohmann::ordered_json line = {{arguments.format.id_field, nlohmann::ordered_json::parse(prompt.id)}};
    if (prompt.text) line[arguments.format.prompt_field] = *prompt.text;
    if (tokenizer) line[arguments.response_field] = completion.text;
    line["ids"] = completion.tokens;
    line["finish_reason"] = infer::name_of(completion.reason);
    return line;
  }
};

/// Streams the text of one request: immediately on a terminal, otherwise when the buffer is full.
void generate_one(infer::Generator& generator, const Task& task, bool prints) {
  const bool flush = ::isatty(STDOUT_FILENO) == 1;
  infer::StopText text(*task.tokenizer, task.arguments.stops);
  const auto completions = generator.generate({task.request(0)}, [&](std::size_t, std::int64_t token) {
    const std::string certain = text.add(static_cast<data::TokenId>(token));
    if (!prints) return;
    write_out(certain);
    if (flush) std::fflush(stdout);
  });
  if (prints) write_out(text.finish() + "\n");
  if (prints && completions.front().reason == infer::FinishReason::max_seq_len) {
    fmt::print(stderr, "ended after {} tokens: with the prompt they are as many as the model can read\n",
               completions.front().tokens.size());
  }
}

void generate_many(infer::Generator& generator, const Task& task, bool prints) {
  std::vector<infer::Request> requests;
  for (std::size_t i = 0; i < task.prompts.all.size(); ++i) requests.push_back(task.request(i));
  const auto completions = generator.generate(requests);
  for (std::size_t i = 0; prints && i < completions.size(); ++i) {
    write_out(task.record(i, completions[i]).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  }
}

/// Everything that the results depend on: contents, but not paths or file times.
nlohmann::json description_of(const Task& task, const Inputs& inputs, const infer::ModelFiles& files) {
  const GenerateArguments& arguments = task.arguments;
  const auto& sampling = arguments.sampling;
  nlohmann::json description = {
      {"weights", weights_identity(files.weights)},
      {"model_config", models::llama_metadata(files.config)},
      {"tokenizer", inputs.tokenizer_hash.empty() ? nlohmann::json() : nlohmann::json(inputs.tokenizer_hash)},
      {"end_tokens", task.end_tokens},
      {"prompts", hash_of_text(inputs.contents)},
      {"prompts_form", arguments.is_chat                ? "conversations"
                       : arguments.prompts_file.empty() ? "arguments"
                       : arguments.format.json_lines    ? "json lines"
                                                        : "lines"},
      {"max_new_tokens", arguments.max_new_tokens},
      {"temperature", sampling.temperature},
      {"top_k", sampling.top_k},
      {"top_p", sampling.top_p},
      {"repetition_penalty", sampling.repetition_penalty},
      {"seed", sampling.seed},
      {"seeds_of_prompts", "hash of seed and number"},
      {"stop", arguments.stops},
      {"ignore_end", arguments.ignore_end},
      {"dtype", arguments.dtype},
      {"fields", {arguments.format.id_field, arguments.format.prompt_field, arguments.response_field}}};
  if (!files.adapter.empty()) description["adapter"] = adapter_identity(files.adapter);
  if (!task.prompts.skipped.empty()) description["seeds_of_prompts"] = "hash of seed and number of the line";
  // The template's text, and what it depends on, such as the date.
  if (arguments.is_chat) description["rendered_conversations"] = hash_of_text(inputs.chat_ids);
  if (arguments.prompts_file.empty()) {  // the boundaries between prompts
    auto& sizes = description["prompt_sizes"] = nlohmann::json::array();
    for (const auto& prompt : arguments.prompts) sizes.push_back(prompt.size());
  }
  return description;
}

std::string joined(const std::vector<std::size_t>& numbers) { return nlohmann::json(numbers).dump(); }

/// Runs the rest of a job. Each copy of the model runs its own share, then helps with the shares of others.
class JobRun {
 public:
  JobRun(const Task& task, const ModelRanks& ranks, infer::Generator& generator, infer::BatchJob& job,
         const std::vector<bool>& finished)
      : task_(task), ranks_(ranks), generator_(generator), job_(job), store_(ranks.process.store, "generate") {
    for (std::size_t i = 0; i < finished.size(); ++i) {
      if (!finished[i]) left_.push_back(i);
    }
    done_before_ = finished.size() - left_.size();
  }

  /// Collective. Returns the prompts that cannot be answered; the first rank reports where and why. No prompt runs
  /// before all are checked.
  std::set<std::size_t> run() {
    if (left_.empty()) return {};
    const Checked checked = check_requests();
    if (task_.arguments.strict && !checked.faults.empty()) throw Error(checked.faults.begin()->second);
    std::set<std::size_t> skipped;
    for (const auto& [number, fault] : checked.faults) {
      skipped.insert(number);
      if (ranks_.is_first()) fmt::print(stderr, "skipped: {}\n", fault);
    }
    std::erase_if(left_, [&](std::size_t number) { return skipped.contains(number); });
    if (!left_.empty()) answer(checked.longest);
    return skipped;
  }

 private:
  void answer(std::int64_t longest) {
    sort_shares();
    infer::WorkStealingQueue share(store_, "prompts", ranks_.member(), ranks_.members(), left_);
    std::optional<ProgressBar> bar;
    if (ranks_.is_first() && !task_.arguments.quiet) {
      bar.emplace("generating", done_before_ + left_.size(), ProgressOptions{.start = done_before_});
    }
    const auto look = [&] {
      if (bar) bar->set(done_before_ + static_cast<std::size_t>(store_.add("done", 0)));
    };
    std::vector<std::size_t> taken;  // indexed by the generator's request number
    auto last_look = std::chrono::steady_clock::now();
    generator_.run({.next =
                        [&](std::int64_t count) {
                          const std::string claimed =
                              ranks_.from_leader(ranks_.leads() ? joined(share.claim(count)) : std::string());
                          std::vector<infer::Request> requests;
                          for (const std::size_t number : nlohmann::json::parse(claimed)) {
                            taken.push_back(number);
                            requests.push_back(task_.request(number));
                          }
                          return requests;
                        },
                    .done =
                        [&](std::size_t i, const infer::Completion& completion) {
                          if (!ranks_.leads()) return;
                          job_.add(taken[i], task_.record(taken[i], completion));
                          store_.add("done", 1);
                        },
                    .on_token =
                        [&](std::size_t, std::int64_t) {
                          if (!bar || std::chrono::steady_clock::now() - last_look < kLook) return;
                          last_look = std::chrono::steady_clock::now();
                          look();
                        },
                    .longest = longest});
    // The first rank shows the progress of the other ranks until they have finished too.
    if (!ranks_.process.world) return look(), bar ? bar->finish() : void();
    Work all = ranks_.process.world->barrier({.async = true});
    while (bar && !all.is_done()) {
      std::this_thread::sleep_for(kLook);
      look();
    }
    all.wait();
    look();
    if (bar) bar->finish();
  }

  /// Sorts each member's share by length, long prompts first, so that prompts that run together have similar lengths.
  void sort_shares() {
    const auto length = [&](std::size_t number) {
      const infer::Prompt& prompt = task_.prompts.all[number];
      return prompt.text ? prompt.text->size() / 4 : prompt.ids.size();
    };
    for (int member = 0; member < ranks_.members(); ++member) {
      const auto [first, end] = infer::WorkStealingQueue::share_of(left_.size(), member, ranks_.members());
      std::ranges::stable_sort(left_.begin() + static_cast<std::ptrdiff_t>(first),
                               left_.begin() + static_cast<std::ptrdiff_t>(end), std::greater(), length);
    }
  }

  struct Checked {
    std::int64_t longest = 1;                   // positions needed by the longest request
    std::map<std::size_t, std::string> faults;  // by prompt
  };

  /// Checks this rank's share before any prompt runs. Returns the results of all ranks.
  Checked check_requests() const {
    Checked mine;
    const auto [first, end] =
        infer::WorkStealingQueue::share_of(left_.size(), ranks_.process.rank, ranks_.process.world_size);
    for (std::size_t i = first; i < end; ++i) {
      const infer::Request request = task_.request(left_[i]);
      if (const auto fault = generator_.fault_of(request); !fault.empty()) {
        mine.faults[left_[i]] = fmt::format("{}: {}", infer::place_of(request, left_[i]), fault);
      } else {
        mine.longest = std::max(mine.longest, generator_.positions_of(request));
      }
    }
    const nlohmann::json told = {mine.longest, mine.faults};
    Checked all;
    for (const auto& text : ranks_.all_gather(told.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace))) {
      const auto theirs = nlohmann::json::parse(text);
      all.longest = std::max(all.longest, theirs[0].get<std::int64_t>());
      all.faults.merge(theirs[1].get<std::map<std::size_t, std::string>>());
    }
    return all;
  }

  const Task& task_;
  const ModelRanks& ranks_;
  infer::Generator& generator_;
  infer::BatchJob& job_;
  PrefixStore store_;
  std::vector<std::size_t> left_;
  std::size_t done_before_ = 0;
};

/// Returns the number of skipped prompts. Collective.
std::size_t run_job(const Task& task, const Inputs& inputs, const infer::ModelFiles& files, const ModelRanks& ranks,
                    infer::Generator& generator) {
  const GenerateArguments& arguments = task.arguments;
  const std::size_t prompts = task.prompts.all.size();
  infer::BatchJob job(arguments.output);
  std::optional<FolderLock> lock;
  if (ranks.is_first()) {
    lock.emplace(arguments.output,
                 FolderLockOptions{.advice = "choose another --output",
                                   .wait = predecessor_timeout(job_identity()),
                                   .log_info = [](const std::string& line) { fmt::print(stderr, "{}\n", line); }});
    if (!lock->unsupported().empty()) fmt::print(stderr, "{}\n", lock->unsupported());
    const auto missing = job.open(description_of(task, inputs, files));
    if (!missing.empty()) {
      fmt::print(stderr, "{}: an earlier version of Phalanx began this job and did not write {}: not compared\n",
                 (std::filesystem::path(arguments.output) / "job.json").string(), fmt::join(missing, ", "));
    }
    for (const auto& skipped : task.prompts.skipped) fmt::print(stderr, "skipped: {}\n", skipped);
  }
  ranks.barrier();
  const std::vector<bool> finished = job.finished(prompts);
  const auto done = static_cast<std::size_t>(std::ranges::count(finished, true));
  if (ranks.is_first() && done > 0 && !arguments.quiet) {
    fmt::print(stderr, "{} of {} prompts are there already\n", done, prompts);
  }
  ranks.barrier();
  if (ranks.leads()) job.begin(ranks.process.rank);
  const auto unanswered = JobRun(task, ranks, generator, job, finished).run();
  ranks.barrier();
  const std::size_t skipped = task.prompts.skipped.size() + unanswered.size();
  if (!ranks.is_first()) return skipped;
  job.merge(prompts, arguments.final_file, unanswered);
  if (!arguments.quiet) {
    fmt::print(stderr, "{}: {} results, {} prompts skipped\n",
               (std::filesystem::path(arguments.output) / arguments.final_file).string(), prompts - unanswered.size(),
               skipped);
  }
  return skipped;
}

/// Prints the speed of all copies of the model together. They work at the same time, so the total time is that of the
/// slowest. Collective.
void print_speeds(const ModelRanks& ranks, const infer::GenerationStats& mine, bool quiet) {
  const nlohmann::json own = {ranks.leads() ? mine.prompt_tokens : 0, mine.prefill_seconds,
                              ranks.leads() ? mine.decoded_tokens : 0, mine.decode_seconds};
  infer::GenerationStats all;
  for (const auto& text : ranks.all_gather(own.dump())) {
    const auto theirs = nlohmann::json::parse(text);
    all.prompt_tokens += theirs[0].get<std::int64_t>();
    all.prefill_seconds = std::max(all.prefill_seconds, theirs[1].get<double>());
    all.decoded_tokens += theirs[2].get<std::int64_t>();
    all.decode_seconds = std::max(all.decode_seconds, theirs[3].get<double>());
  }
  if (quiet || !ranks.is_first() || all.prompt_tokens == 0) return;
  const auto line = [](const char* what, std::int64_t tokens, double seconds) {
    return fmt::format("{} {} tokens in {:.2f} s ({} tokens/s)", what, with_commas(tokens), seconds,
                       with_commas(seconds > 0 ? static_cast<std::int64_t>(static_cast<double>(tokens) / seconds) : 0));
  };
  fmt::print(stderr, "{}; {}\n", line("prefill", all.prompt_tokens, all.prefill_seconds),
             line("decode", all.decoded_tokens, all.decode_seconds));
}

}  // namespace

int generate_worker(const Arguments& arguments) {
  const GenerateArguments parsed = parse_generate_arguments(arguments);
  Inputs inputs = read_prompts(parsed);
  infer::ModelFiles files = find_model(parsed);
  const ModelRanks ranks = start_model_ranks(parsed, arguments);
  // Prompts that are given as ids need no tokenizer. If there is one, it is used for the text of the answers.
  const bool needs_tokenizer =
      parsed.is_chat || !parsed.stops.empty() ||
      std::ranges::any_of(inputs.prompts.all, [](const infer::Prompt& prompt) { return prompt.text.has_value(); });
  std::optional<data::BpeTokenizer> tokenizer;
  const auto read_tokenizer = [&] {
    if (!needs_tokenizer && !files.tokenizer && parsed.tokenizer.empty()) return;
    tokenizer = infer::load_tokenizer(files, parsed.tokenizer, parsed.allow_tokenizer_mismatch);
    std::filesystem::path path = parsed.tokenizer.empty() ? *files.tokenizer : parsed.tokenizer;
    if (std::filesystem::is_directory(path)) path /= "tokenizer.json";
    inputs.tokenizer_hash = hash_of_text(read_file(path));
  };
  ranks.run([&] {
    ranks.each(read_tokenizer);
    ranks.require_same("prompts and tokenizer",
                       {{"prompts", hash_of_text(inputs.contents)}, {"tokenizer", inputs.tokenizer_hash}});
  });
  if (tokenizer && needs_tokenizer && !tokenizer->model().suffix.empty()) {
    log::warn_once(
        "the tokenizer's template puts a token behind each prompt, as transformers does: the model goes on after it");
  }
  if (const auto& repeated = inputs.prompts.repeated; !repeated.empty()) {
    log::warn_once(fmt::format("{} of the results have an id that another has, too: {}{}", repeated.size(),
                               repeated.front(), repeated.size() == 1 ? "" : ", and more"));
  }
  auto end_tokens = infer::end_tokens(files, tokenizer);
  if (parsed.is_chat) {
    const std::string beside = parsed.tokenizer.empty() ? *files.tokenizer : parsed.tokenizer;
    const data::ConversationTokenizer tokenize(data::ChatTemplate::load(beside, parsed.chat_template), *tokenizer);
    ranks.run([&] {
      ranks.each([&] { fill_chat_prompts(inputs, tokenize, parsed.format.skips_malformed); });
      ranks.require_same("rendered conversations", {{"ids", hash_of_text(inputs.chat_ids)}});
    });
    add_end_of_turn(end_tokens, tokenize);
  }
  const Task task{parsed, inputs.prompts, tokenizer, end_tokens};
  std::size_t skipped = 0;
  ranks.run([&] {
    const auto model = load_model(files, ranks, parsed.dtype);
    infer::Generator generator(*model, {.max_batch = parsed.batch_size,
                                        .cache_bytes = parsed.cache_bytes,
                                        .stages = ranks.stages,
                                        .tokenizer = tokenizer ? &*tokenizer : nullptr});
    if (!parsed.output.empty()) {
      skipped = run_job(task, inputs, files, ranks, generator);
    } else if (parsed.streams()) {
      generate_one(generator, task, ranks.is_first());
    } else {
      generate_many(generator, task, ranks.is_first());
    }
    if (std::fflush(stdout) != 0) throw Error("cannot write to standard output");
    print_speeds(ranks, generator.stats(), parsed.quiet);
  });
  if (skipped > 0 && !parsed.allow_skipped && ranks.is_first()) {
    throw DataError(fmt::format(
        "{}: {} prompt{} skipped, as told above; all others are answered, in {}. Where that is "
        "meant, --allow-skipped makes it status 0",
        parsed.prompts_file.empty() ? "--prompt" : parsed.prompts_file, skipped, skipped == 1 ? " was" : "s were",
        (std::filesystem::path(parsed.output) / parsed.final_file).string()));
  }
  return 0;
}

}  // namespace phalanx::cli
