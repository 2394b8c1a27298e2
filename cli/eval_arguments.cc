#include "cli/eval_arguments.h"

#include <fmt/format.h>

#include <tuple>
#include <utility>
#include <vector>

#include "cli/parse_options.h"
#include "phalanx/base/error.h"

namespace phalanx::cli {

const std::string_view kEvalHelp =
    R"(usage: phalanx eval [-n N] --checkpoint DIR (--text FILE | --tokens FILE | --choices FILE.jsonl) [options]

Says how well a model predicts a text (perplexity), or which of several continuations it holds to be the likeliest
(multiple choice).

  --checkpoint DIR         a run's folder or its checkpoint folder (the newest complete step), one of the step-N
                           directories, or a Hugging Face directory
  --text FILE              a text, turned into tokens by the model's tokenizer
  --tokens FILE            a token file, in any of the formats of training (docs/data.md)
  --choices FILE.jsonl     questions: {"prompt": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0} a line. Accuracy goes
                           by the likeliest continuation, and by the likeliest per byte
  --adapter DIR            an adapter of the model, as PEFT saves it: a folder with adapter_config.json (docs/lora.md)
  --allow-base-mismatch    use it although it was trained on other weights than those of this model
  --tokenizer FILE         tokenizer.json; where not given, looked for beside the checkpoint and in the run's folder
  --allow-tokenizer-mismatch  go on, with a warning, although the tokenizer (or that of a token file) is another one
                           than the model was trained with
  --allow-model-mismatch   take config.json's word where weights that Phalanx wrote say that they are of another model

  --seq-len N              tokens of a window over the text (default: the model's max_seq_len)
  --stride N               tokens by which windows move on; below --seq-len each token is predicted from more of what is
                           before it, at more cost (default: --seq-len)
  --max-tokens N           the first N tokens only
  --end-token-first        of --text, where the tokenizer puts no token before a text: put the one that ends texts
                           there, so that the first token is predicted, too. Without it nothing is put there, as in
                           transformers
  --batch-size N           windows or continuations in one pass (default 8)
  --json FILE              write the figures there, too
  --output FILE.jsonl      write the log-likelihoods of every question's choices
  --allow-skipped          a question that is malformed, or has a choice of more tokens than the model takes, is skipped
                           and named, all others are scored, and the status in the end is 1; with this it is 0
  --strict                 the first malformed question ends the command before anything is scored

  -n, --nproc-per-node N   start N ranks on this node; each group of TP x PP has the model and a part of the work
  --tp N, --pp N           cut the model over N ranks by tensor parallelism, by its layers
  --dtype TYPE             float32, bfloat16 or float16 (default float32)
  --device DEVICE          cpu, cuda or cuda:N (default: cuda where there is one)
  --backend NAME           of the communication between ranks (default auto)
  --quiet                  no progress

  phalanx eval --checkpoint outputs/checkpoint --text README.md
  phalanx eval -n 4 --tp 2 --checkpoint Llama-3.2-1B --choices questions.jsonl --json accuracy.json
)";

EvalArguments parse_eval_arguments(const Arguments& arguments) {
  EvalArguments parsed;
  CLI::App app;
  add_model_options(app, parsed);
  app.add_option("--text", parsed.text);
  app.add_option("--tokens", parsed.tokens);
  app.add_option("--choices", parsed.choices);
  const std::vector<CLI::Option*> windows = {app.add_option("--seq-len", parsed.seq_len),
                                             app.add_option("--stride", parsed.stride),
                                             app.add_option("--max-tokens", parsed.max_tokens)};
  app.add_flag("--end-token-first", parsed.end_token_first);
  app.add_option("--json", parsed.json);
  app.add_option("--output", parsed.output);
  app.add_flag("--allow-skipped", parsed.allow_skipped);
  app.add_flag("--strict", parsed.strict);
  parse_options(app, arguments);
  check_model_options(parsed);
  for (const auto& [name, value, is_given] : {std::tuple{"--seq-len", parsed.seq_len, windows[0]->count() > 0},
                                              {"--stride", parsed.stride, windows[1]->count() > 0},
                                              {"--max-tokens", parsed.max_tokens, windows[2]->count() > 0}}) {
    if (is_given) require_range(name, value, 1);
  }
  const int given = !parsed.text.empty() + !parsed.tokens.empty() + !parsed.choices.empty();
  if (given != 1) throw UsageError("expected one of --text FILE, --tokens FILE and --choices FILE.jsonl");
  if (!parsed.choices.empty() && (parsed.seq_len > 0 || parsed.stride > 0 || parsed.max_tokens > 0)) {
    throw UsageError("--seq-len, --stride and --max-tokens are for --text and --tokens");
  }
  if (parsed.text.empty() && parsed.end_token_first) throw UsageError("--end-token-first is a part of --text FILE");
  if (parsed.choices.empty() && !parsed.output.empty()) throw UsageError("--output is a part of --choices FILE.jsonl");
  if (parsed.choices.empty() && (parsed.strict || parsed.allow_skipped)) {
    throw UsageError(
        fmt::format("{} is a part of --choices FILE.jsonl", parsed.strict ? "--strict" : "--allow-skipped"));
  }
  if (parsed.strict && parsed.allow_skipped) throw UsageError("--strict and --allow-skipped exclude each other");
  for (const auto& [name, output] : {std::pair{"--json", parsed.json}, {"--output", parsed.output}}) {
    for (const std::string& input : {parsed.text, parsed.tokens, parsed.choices}) refuse_same_file(name, output, input);
  }
  if (!parsed.json.empty() && parsed.json == parsed.output) {
    throw UsageError(fmt::format("--json and --output are the same file, {}: expected two", parsed.json));
  }
  if (parsed.seq_len > 0 && parsed.stride > parsed.seq_len) {
    throw UsageError(fmt::format("--stride is {}: expected at most --seq-len, {}", parsed.stride, parsed.seq_len));
  }
  return parsed;
}

}  // namespace phalanx::cli
