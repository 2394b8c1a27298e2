#include "cli/generate_command.h"

#include <ATen/Context.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/parse_options.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/human.h"
#include "phalanx/data/bpe_tokenizer.h"
#include "phalanx/infer/generator.h"
#include "phalanx/infer/model_files.h"

namespace phalanx::cli {
namespace {

constexpr std::string_view kGenerateHelp =
    R"(usage: phalanx generate --checkpoint DIR (--prompt TEXT | --prompts-file FILE) [options]

Continues a text with a trained model. One prompt: the continuation goes to standard output as it is made. Several: one
JSON line for each, {"id", "prompt", "completion", "ids", "finish_reason"}, in their order. Speeds go to standard error.

  --checkpoint DIR         a run's checkpoint folder (the newest complete step), one of its step-N directories, or a
                           Hugging Face directory of a Llama (config.json, safetensors)
  --prompt TEXT            the text to continue; may be repeated. An empty one begins a document
  --prompts-file FILE      prompts: one a line; or, if FILE ends in .jsonl, one JSON object a line with "prompt" (text) or
                           "ids" (token ids) and, if wanted, "id"
  --tokenizer FILE         tokenizer.json; where not given, looked for beside the checkpoint and in the run's folder
  --max-new-tokens N       at most this many tokens a prompt (default 128)
  --temperature T          below 1 more predictable, above 1 more varied; 0 is --greedy (default 1)
  --top-k K                draw from the K likeliest tokens only (default 0: all)
  --top-p P                draw from the likeliest tokens that make up probability P only (default 1: all)
  --greedy                 always the likeliest token
  --seed N                 of the draws: the same seed gives the same text (default 0). Prompt i draws with seed N + i
  --batch-size N           prompts that run together (default 8)
  --ignore-end             do not stop at the end-of-text token
  --device DEVICE          cpu, cuda or cuda:N (default: cuda where there is one)
  --quiet                  no speeds

  phalanx generate --checkpoint outputs/checkpoint --prompt "A communicator is" --temperature 0.8 --top-p 0.95
  phalanx generate --checkpoint outputs/checkpoint/step-200 --prompts-file prompts.txt --greedy > completions.jsonl
)";

struct GenerateArguments {
  std::string checkpoint;
  std::vector<std::string> prompts;
  std::string prompts_file;
  std::string tokenizer;
  std::int64_t max_new_tokens = 128;
  infer::SamplingOptions sampling;
  std::int64_t batch_size = 8;
  bool ignore_end = false;
  std::string device;
  bool quiet = false;
};

GenerateArguments parse_generate(const Arguments& arguments) {
  GenerateArguments parsed;
  bool greedy = false;
  CLI::App app;
  app.add_option("--checkpoint", parsed.checkpoint);
  app.add_option("--prompt", parsed.prompts)->expected(1)->take_all()->allow_extra_args(false);
  app.add_option("--prompts-file", parsed.prompts_file);
  app.add_option("--tokenizer", parsed.tokenizer);
  app.add_option("--max-new-tokens", parsed.max_new_tokens);
  auto* temperature = app.add_option("--temperature", parsed.sampling.temperature);
  app.add_option("--top-k", parsed.sampling.top_k);
  app.add_option("--top-p", parsed.sampling.top_p);
  app.add_flag("--greedy", greedy);
  std::int64_t seed = 0;
  app.add_option("--seed", seed);
  app.add_option("--batch-size", parsed.batch_size);
  app.add_flag("--ignore-end", parsed.ignore_end);
  app.add_option("--device", parsed.device);
  app.add_flag("--quiet,-q", parsed.quiet);
  parse_options(app, arguments);
  if (parsed.checkpoint.empty()) throw UsageError("--checkpoint DIR is missing: a run's checkpoint folder");
  if (parsed.prompts.empty() == parsed.prompts_file.empty()) {
    throw UsageError("expected either --prompt TEXT (it may be repeated) or --prompts-file FILE");
  }
  if (greedy && temperature->count() > 0 && parsed.sampling.temperature != 0) {
    throw UsageError("--greedy and --temperature exclude each other");
  }
  if (greedy) parsed.sampling.temperature = 0;
  if (parsed.max_new_tokens < 1) {
    throw UsageError(fmt::format("--max-new-tokens is {}: expected 1 or more", parsed.max_new_tokens));
  }
  if (seed < 0) throw UsageError(fmt::format("--seed is {}: expected 0 or more", seed));
  parsed.sampling.seed = static_cast<std::uint64_t>(seed);
  if (parsed.batch_size < 1) throw UsageError(fmt::format("--batch-size is {}: expected 1 or more", parsed.batch_size));
  parsed.sampling.validate();
  return parsed;
}

struct Prompt {
  nlohmann::json id;
  std::optional<std::string> text;
  std::vector<std::int64_t> ids;
};

std::vector<Prompt> read_prompts(const GenerateArguments& arguments) {
  std::vector<Prompt> prompts;
  const auto next_id = [&] { return nlohmann::json(prompts.size()); };
  for (const auto& text : arguments.prompts) prompts.push_back({next_id(), text, {}});
  if (arguments.prompts_file.empty()) return prompts;

  const std::string contents = read_file(arguments.prompts_file);
  const bool is_jsonl = arguments.prompts_file.ends_with(".jsonl");
  std::size_t number = 0;
  for (std::size_t begin = 0; begin < contents.size();) {
    const auto end = std::min(contents.find('\n', begin), contents.size());
    std::string line = contents.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty()) continue;
    if (!is_jsonl) {
      prompts.push_back({next_id(), std::move(line), {}});
      continue;
    }
    const auto fail = [&](const std::string& reason) {
      throw DataError(fmt::format("{}, line {}: {}", arguments.prompts_file, number, reason));
    };
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) fail("expected a JSON object");
    if (json.contains("prompt") == json.contains("ids"))
      fail("expected either \"prompt\" (text) or \"ids\" (token ids)");
    Prompt prompt{json.value("id", next_id()), std::nullopt, {}};
    try {
      if (json.contains("prompt")) {
        prompt.text = json["prompt"].get<std::string>();
      } else {
        for (const auto& id : json["ids"]) {
          if (!id.is_number_integer()) fail("\"ids\" must be a list of integers");
          prompt.ids.push_back(id.get<std::int64_t>());
        }
      }
    } catch (const nlohmann::json::exception&) {
      fail("\"prompt\" must be a string, \"ids\" a list of integers");
    }
    prompts.push_back(std::move(prompt));
  }
  if (prompts.empty()) throw DataError(fmt::format("{} holds no prompts", arguments.prompts_file));
  return prompts;
}

at::Device choose_device(const std::string& name) {
  if (name.empty()) return at::hasCUDA() ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  if (name != "cpu" && name != "cuda" && !name.starts_with("cuda:")) {
    throw UsageError(fmt::format("--device is '{}': expected cpu, cuda or cuda:N", name));
  }
  if (name == "cpu") return at::kCPU;
  if (!at::hasCUDA())
    throw Error(fmt::format("--device {}: this machine or build of libtorch has no CUDA device", name));
  const std::string number = name == "cuda" ? "0" : name.substr(5);
  if (number.empty() || number.size() > 3 || number.find_first_not_of("0123456789") != std::string::npos ||
      std::stoi(number) >= static_cast<int>(at::getNumGPUs())) {
    throw UsageError(fmt::format("--device is '{}': this machine has {} CUDA devices", name, at::getNumGPUs()));
  }
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(std::stoi(number)));
}

data::BpeTokenizer load_tokenizer(const GenerateArguments& arguments, const infer::ModelFiles& files) {
  if (!arguments.tokenizer.empty()) return data::BpeTokenizer::load(arguments.tokenizer);
  if (files.tokenizer) return data::BpeTokenizer::load(*files.tokenizer);
  std::string places;
  for (const auto& place : files.tokenizer_places) places += "\n  " + place;
  throw DataError(fmt::format("no tokenizer found; give --tokenizer FILE. Looked for:{}", places));
}

void write_out(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) throw Error("cannot write to standard output");
}

void print_speeds(const infer::GenerationStats& stats) {
  const auto line = [](const char* what, std::int64_t tokens, double seconds) {
    return fmt::format("{} {} tokens in {:.2f} s ({} tokens/s)", what, with_commas(tokens), seconds,
                       with_commas(seconds > 0 ? static_cast<std::int64_t>(static_cast<double>(tokens) / seconds) : 0));
  };
  fmt::print(stderr, "{}; {}\n", line("prefill", stats.prompt_tokens, stats.prefill_seconds),
             line("decode", stats.decoded_tokens, stats.decode_seconds));
}

/// Streams one request's text: at once on a terminal, else as the buffer fills.
void generate_one(infer::Generator& generator, const infer::Request& request, const data::BpeTokenizer& tokenizer) {
  const bool flush = ::isatty(STDOUT_FILENO) == 1;
  data::StreamingDecoder decoder(tokenizer, {.skip_special_tokens = true});
  generator.generate({request}, [&](std::size_t, std::int64_t token) {
    write_out(decoder.add(static_cast<data::TokenId>(token)));
    if (flush) std::fflush(stdout);
  });
  write_out(decoder.finish() + "\n");
}

void generate_many(infer::Generator& generator, const std::vector<infer::Request>& requests,
                   const std::vector<Prompt>& prompts, const std::optional<data::BpeTokenizer>& tokenizer) {
  const auto completions = generator.generate(requests);
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    nlohmann::ordered_json line = {{"id", prompts[i].id}};
    if (prompts[i].text) line["prompt"] = *prompts[i].text;
    if (tokenizer) line["completion"] = tokenizer->decode(completions[i].tokens, {.skip_special_tokens = true});
    line["ids"] = completions[i].tokens;
    line["finish_reason"] = infer::name_of(completions[i].reason);
    write_out(line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  }
}

}  // namespace

int generate_command(const Arguments& arguments) {
  if (arguments.empty() || arguments[0] == "--help" || arguments[0] == "-h") {
    fmt::print(arguments.empty() ? stderr : stdout, "{}", kGenerateHelp);
    return arguments.empty() ? 2 : 0;
  }
  const GenerateArguments parsed = parse_generate(arguments);
  const auto prompts = read_prompts(parsed);
  const auto device = choose_device(parsed.device);
  const auto files = infer::find_model(parsed.checkpoint);

  // Prompts given as ids need no tokenizer, but the text of the answers is welcome where there is one.
  const bool needs_tokenizer =
      std::ranges::any_of(prompts, [](const Prompt& prompt) { return prompt.text.has_value(); });
  std::optional<data::BpeTokenizer> tokenizer;
  if (needs_tokenizer || files.tokenizer || !parsed.tokenizer.empty()) tokenizer = load_tokenizer(parsed, files);
  constexpr data::TokenId kNone = -1;
  const data::TokenId end = tokenizer ? tokenizer->end_of_text().value_or(kNone) : kNone;

  std::vector<infer::Request> requests;
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    infer::Request request{
        .prompt = prompts[i].ids, .max_new_tokens = parsed.max_new_tokens, .sampling = parsed.sampling};
    request.sampling.seed += i;
    if (prompts[i].text) {
      const auto ids = tokenizer->encode(*prompts[i].text, {.add_special_tokens = true});
      request.prompt.assign(ids.begin(), ids.end());
      if (request.prompt.empty() && end != kNone)
        request.prompt.push_back(end);  // documents begin after an end of text
    }
    if (end != kNone && !parsed.ignore_end) request.stop_tokens.push_back(end);
    requests.push_back(std::move(request));
  }

  const auto model = infer::load_model(files, device);
  infer::Generator generator(*model, {.max_batch = parsed.batch_size});
  if (prompts.size() == 1 && parsed.prompts_file.empty()) {
    generate_one(generator, requests[0], *tokenizer);
  } else {
    generate_many(generator, requests, prompts, tokenizer);
  }
  if (std::fflush(stdout) != 0) throw Error("cannot write to standard output");
  if (!parsed.quiet) print_speeds(generator.stats());
  return 0;
}

}  // namespace phalanx::cli
