#include "cli/generate_arguments.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "cli/parse_options.h"
#include "phalanx/base/error.h"
#include "phalanx/base/parse_text.h"

namespace phalanx::cli {

const std::string_view kGenerateHelp =
    R"(usage: phalanx generate [-n N] --checkpoint DIR (--prompt TEXT | --prompts-file FILE | --chat FILE) [options]

Continues texts with a trained model. One prompt: the continuation goes to standard output as it is made. Several: one
JSON line for each, {"id", "prompt", "completion", "ids", "finish_reason"}, in their order. With --output a job: its
folder gets the results as they come and, in the end, all in one file; after a crash the same command goes on. Speeds go
to standard error.

  --checkpoint DIR         a run's folder or its checkpoint folder (the newest complete step), one of the step-N
                           directories, or a Hugging Face directory (config.json, safetensors)
  --prompt TEXT            the text to continue; may be repeated. An empty one begins a document
  --prompts-file FILE      prompts: one a line; or, if FILE ends in .jsonl or .ndjson, one JSON object a line with
                           "prompt" (text) or "ids" (token ids) and, if wanted, "id"
  --chat FILE              conversations, one JSON object a line (docs/chat.md): answers the last message of each, by
                           the model's chat template. - is standard input
  --chat-template NAME     where the model has several: which one (default: its own choice)
  --adapter DIR            an adapter of the model, as PEFT saves it: a folder with adapter_config.json (docs/lora.md)
  --allow-base-mismatch    use it although it was trained on other weights than those of this model
  --tokenizer FILE         tokenizer.json; where not given, looked for beside the checkpoint and in the run's folder
  --allow-tokenizer-mismatch  go on, with a warning, although the tokenizer (or that of a token file) is another one
                           than the model was trained with
  --allow-model-mismatch   take config.json's word where weights that Phalanx wrote say that they are of another model

  --max-new-tokens N       at most this many tokens a prompt (default 128)
  --temperature T          below 1 more predictable, above 1 more varied; 0 is --greedy (default 1)
  --top-k K                draw from the K likeliest tokens only (default 0: all)
  --top-p P                draw from the likeliest tokens that make up probability P only (default 1: all)
  --repetition-penalty R   above 1: tokens that were there already become less likely (default 1)
  --greedy                 always the likeliest token
  --seed N                 of the draws: the same seed gives the same text (default 0). Every prompt draws with a seed
                           of its own, a hash of N and its number
  --stop TEXT              end before this text; may be repeated
  --ignore-end             do not stop at the tokens that end a text

  --batch-size N           prompts that run together on a rank, or on the ranks that share a model (default 8)
  --cache-memory SIZE      of a rank's keys and values, at most (such as 4GiB); fewer prompts run together then

  --output DIR             a job's folder: part-RANK.jsonl as results come, in the end --final-file in the order of
                           prompts. A prompt that cannot be answered (no JSON, a field that is missing or of a wrong
                           type, tokens that the model has not, too long) is skipped and named; with any the status in
                           the end is 1
  --allow-skipped          skipped prompts are no failure: status 0
  --strict                 the first such prompt ends the job before anything is answered
  --final-file NAME        (default results.jsonl)
  --prompt-field NAME, --id-field NAME, --response-field NAME
                           in the prompts and the results (default prompt, id, completion)

  -n, --nproc-per-node N   start N ranks on this node; each group of TP x PP has the model and its share of the prompts,
                           and who is through takes from the others
  --tp N                   cut every matrix over N ranks (tensor parallelism)
  --pp N                   cut the model by its layers over N ranks
  --dtype TYPE             float32, bfloat16 or float16: of weights and computing (default float32)
  --device DEVICE          cpu, cuda or cuda:N (default: cuda where there is one)
  --backend NAME           of the communication between ranks (default auto)
  --quiet                  no speeds, no progress

  phalanx generate --checkpoint outputs/checkpoint --prompt "A communicator is" --temperature 0.8 --top-p 0.95
  phalanx generate --checkpoint outputs/checkpoint/step-200 --prompts-file prompts.txt --greedy > completions.jsonl
  phalanx generate --checkpoint SmolLM2-135M-Instruct --chat questions.jsonl --greedy
  phalanx generate -n 4 --tp 2 --checkpoint Llama-3.2-1B --prompts-file prompts.jsonl --output answers
)";

namespace {

/// --chat FILE is a prompts file of conversations.
void take_chat(GenerateArguments& parsed, const std::string& chat) {
  if (chat.empty() && !parsed.chat_template.empty()) throw UsageError("--chat-template is a part of --chat FILE");
  if (chat.empty()) return;
  if (!parsed.prompts_file.empty()) throw UsageError("--chat and --prompts-file exclude each other");
  const infer::PromptFormat usual;
  if (parsed.format.prompt_field != usual.prompt_field || parsed.format.id_field != usual.id_field) {
    throw UsageError("--prompt-field and --id-field are of --prompts-file FILE: conversations have fixed fields");
  }
  parsed.prompts_file = chat == "-" ? "/dev/stdin" : chat;
  parsed.is_chat = true;
}

}  // namespace

GenerateArguments parse_generate_arguments(const Arguments& arguments) {
  GenerateArguments parsed;
  std::string cache_memory, chat;
  CLI::App app;
  add_model_options(app, parsed);
  add_repeated_option(app, "--prompt", parsed.prompts);
  app.add_option("--prompts-file", parsed.prompts_file);
  app.add_option("--chat", chat);
  app.add_option("--chat-template", parsed.chat_template);
  add_sampling_options(app, parsed);
  app.add_option("--cache-memory", cache_memory);
  app.add_flag("--ignore-end", parsed.ignore_end);
  app.add_option("--output", parsed.output);
  app.add_flag("--allow-skipped", parsed.allow_skipped);
  app.add_flag("--strict", parsed.strict);
  auto* final_file = app.add_option("--final-file", parsed.final_file);
  app.add_option("--prompt-field", parsed.format.prompt_field);
  app.add_option("--id-field", parsed.format.id_field);
  app.add_option("--response-field", parsed.response_field);
  parse_options(app, arguments);
  check_model_options(parsed);
  take_chat(parsed, chat);
  if (parsed.prompts.empty() == parsed.prompts_file.empty()) {
    throw UsageError("expected one of --prompt TEXT (it may be repeated), --prompts-file FILE, --chat FILE");
  }
  check_sampling_options(parsed);
  if (!cache_memory.empty()) parsed.cache_bytes = parse_size("--cache-memory", cache_memory);
  if (parsed.output.empty() && final_file->count() > 0) throw UsageError("--final-file is a part of --output DIR");
  if (parsed.final_file.empty() || parsed.final_file.find('/') != std::string::npos) {
    throw UsageError(fmt::format("--final-file is '{}': expected the name of a file in the folder", parsed.final_file));
  }
  // The names of a job's own files in its folder (infer/jobs/batch_job.h).
  if (parsed.final_file == "job.json" ||
      (parsed.final_file.starts_with("part-") && parsed.final_file.ends_with(".jsonl"))) {
    throw UsageError(fmt::format("--final-file is '{}', as the job names a file of its own: choose another name",
                                 parsed.final_file));
  }
  const std::vector<std::pair<const char*, std::string>> fields = {{"--prompt-field", parsed.format.prompt_field},
                                                                   {"--id-field", parsed.format.id_field},
                                                                   {"--response-field", parsed.response_field}};
  for (std::size_t i = 0; i < fields.size(); ++i) {
    const auto& [name, field] = fields[i];
    if (field.empty()) throw UsageError(fmt::format("{} is empty: expected the name of a field", name));
    const auto& [other, its_field] = fields[(i + 1) % fields.size()];
    if (field == its_field) {
      throw UsageError(fmt::format("{} and {} are both '{}': one of the two would be lost", name, other, field));
    }
    for (const char* taken : {"ids", "finish_reason"}) {
      if (field == taken) {
        throw UsageError(fmt::format("{} is '{}', which results use for something else: choose another", name, field));
      }
    }
  }
  if (parsed.prompts_file == "-") throw UsageError("--prompts-file is '-': expected a file, such as /dev/stdin");
  const std::string name = lower_case(parsed.prompts_file);
  parsed.format.json_lines = name.ends_with(".jsonl") || name.ends_with(".ndjson");
  if (parsed.output.empty() && (parsed.strict || parsed.allow_skipped)) {
    throw UsageError(fmt::format("{} is a part of --output DIR", parsed.strict ? "--strict" : "--allow-skipped"));
  }
  if (parsed.strict && parsed.allow_skipped) throw UsageError("--strict and --allow-skipped exclude each other");
  parsed.format.skips_malformed = !parsed.output.empty() && !parsed.strict;
  return parsed;
}

}  // namespace phalanx::cli
