#include "cli/worker/chat_worker.h"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/chat_arguments.h"
#include "cli/worker/chat_end.h"
#include "cli/worker/model_ranks.h"
#include "phalanx/base/derived_seed.h"
#include "phalanx/base/error.h"
#include "phalanx/base/utf8.h"
#include "phalanx/data/chat/conversation.h"
#include "phalanx/data/chat/tokenized_conversation.h"
#include "phalanx/data/jinja/json_value.h"
#include "phalanx/infer/generator.h"
#include "phalanx/infer/model_files.h"
#include "phalanx/infer/stop_text.h"

namespace phalanx::cli {
namespace {

/// Ctrl-C during an answer: the first one is counted, the next one ends the program, as it does at any other time.
std::atomic<bool> interrupted_answer{false};

extern "C" void note_interrupt(int) { interrupted_answer = true; }

class CatchInterrupt {
 public:
  CatchInterrupt() {
    interrupted_answer = false;
    struct sigaction action {};
    action.sa_handler = note_interrupt;
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    sigaction(SIGINT, &action, &before_);
  }
  ~CatchInterrupt() { sigaction(SIGINT, &before_, nullptr); }
  CatchInterrupt(const CatchInterrupt&) = delete;
  CatchInterrupt& operator=(const CatchInterrupt&) = delete;

 private:
  struct sigaction before_ {};
};

/// Leaves the generator from its callback.
struct AnswerStopped {};

void say(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw Error("cannot write to standard output");
  }
}

/// A line of standard input without its end; nullopt at the end.
std::optional<std::string> read_line() {
  constexpr std::size_t kLongest = 16 << 20;
  std::string line;
  for (int c = std::getchar(); c != EOF; c = std::getchar()) {
    if (c == '\n') return line;
    line += static_cast<char>(c);
    if (line.size() > kLongest) throw DataError("a line of the input is longer than 16 MiB");
  }
  return line.empty() ? std::nullopt : std::optional(line);
}

class Chat {
 public:
  Chat(const ChatArguments& arguments, models::Llama& model, const data::ConversationTokenizer& tokenize,
       std::vector<std::int64_t> end_tokens)
      : arguments_(arguments), model_(model), tokenize_(tokenize), end_tokens_(std::move(end_tokens)) {
    begin();
  }

  void run() {
    const bool asks = ::isatty(STDIN_FILENO) == 1 && ::isatty(STDOUT_FILENO) == 1;
    for (;;) {
      if (asks) say("> ");
      const auto line = read_line();
      if (!line || *line == "/exit") break;
      if (*line == "/new") {
        begin();
      } else if (!line->empty()) {
        answer(*line);
      }
    }
    if (asks) say("\n");
  }

 private:
  void begin() {
    conversation_ = {};
    conversation_.where = "this conversation";
    if (!arguments_.system.empty()) conversation_.messages.push_back(data::make_message("system", arguments_.system));
    if (arguments_.variables.empty()) return;
    const auto variables = jinja::read_json(arguments_.variables, "--variables");
    if (!variables.is_dict())
      throw UsageError("--variables: expected a JSON object, such as {\"enable_thinking\": false}");
    for (const auto& [name, value] : variables.dict().entries())
      conversation_.variables.emplace_back(name.text(), value);
  }

  void answer(const std::string& message) {
    if (!is_utf8(message)) {
      fmt::print(stderr, "the message is not valid UTF-8: it is left out\n");
      return;
    }
    conversation_.messages.push_back(data::make_message("user", message));
    infer::Generator generator(model_, {.max_batch = 1, .tokenizer = &tokenize_.tokenizer()});
    const infer::Request request = make_request();
    if (const std::string fault = generator.fault_of(request); !fault.empty()) {
      conversation_.messages.pop_back();
      fmt::print(stderr, "{}: the message is left out; /new begins a new conversation\n", fault);
      return;
    }
    const std::string text = streamed(generator, request);
    conversation_.messages.push_back(data::make_message("assistant", text));
    print_speed(generator.stats());
  }

  infer::Request make_request() const {
    const auto ids = tokenize_.prompt(conversation_);
    infer::Request request{.prompt = {ids.begin(), ids.end()},
                           .max_new_tokens = arguments_.max_new_tokens,
                           .sampling = arguments_.sampling,
                           .stop_tokens = end_tokens_,
                           .stop_strings = arguments_.stops,
                           .where = "this conversation"};
    request.sampling.seed = derived_seed(request.sampling.seed, conversation_.messages.size());
    return request;
  }

  /// Prints the answer as it is made. Returns it, also where it was stopped.
  std::string streamed(infer::Generator& generator, const infer::Request& request) const {
    infer::StopText stream(tokenize_.tokenizer(), arguments_.stops);
    std::string text;
    const auto show = [&](const std::string& part) {
      text += part;
      say(part);
    };
    const CatchInterrupt catching;
    try {
      const auto completions = generator.generate({request}, [&](std::size_t, std::int64_t token) {
        if (interrupted_answer) throw AnswerStopped();
        show(stream.add(static_cast<data::TokenId>(token)));
      });
      show(stream.finish());
      say("\n");
      say_why_it_ended(completions.front());
    } catch (const AnswerStopped&) {
      show(stream.finish());
      say("\n");
    }
    return readable(text);
  }

  /// Bytes that are no characters, which a model can say, become U+FFFD: templates read text.
  static std::string readable(const std::string& text) {
    constexpr auto kReplace = nlohmann::json::error_handler_t::replace;
    return is_utf8(text)
               ? text
               : nlohmann::json::parse(nlohmann::json(text).dump(-1, ' ', false, kReplace)).get<std::string>();
  }

  static void say_why_it_ended(const infer::Completion& completion) {
    using infer::FinishReason;
    if (completion.reason == FinishReason::max_new_tokens) {
      fmt::print(stderr, "(ended after --max-new-tokens {})\n", completion.tokens.size());
    } else if (completion.reason == FinishReason::max_seq_len) {
      fmt::print(stderr, "(ended: the conversation is as long as the model can read; /new begins a new one)\n");
    }
  }

  void print_speed(const infer::GenerationStats& stats) const {
    if (arguments_.quiet || stats.decode_seconds <= 0) return;
    fmt::print(stderr, "({} tokens of the conversation, {:.1f} tokens/s)\n",
               stats.prompt_tokens + 1 + stats.decoded_tokens,
               static_cast<double>(stats.decoded_tokens) / stats.decode_seconds);
  }

  const ChatArguments& arguments_;
  models::Llama& model_;
  const data::ConversationTokenizer& tokenize_;
  std::vector<std::int64_t> end_tokens_;
  data::Conversation conversation_;
};

}  // namespace

int chat_worker(const Arguments& arguments) {
  const ChatArguments parsed = parse_chat_arguments(arguments);
  infer::ModelFiles files = find_model(parsed);
  const data::BpeTokenizer tokenizer = infer::load_tokenizer(files, parsed.tokenizer, parsed.allow_tokenizer_mismatch);
  const std::string beside = parsed.tokenizer.empty() ? *files.tokenizer : parsed.tokenizer;
  const data::ConversationTokenizer tokenize(data::ChatTemplate::load(beside, parsed.chat_template), tokenizer);
  auto end_tokens = infer::end_tokens(files, tokenizer);
  add_end_of_turn(end_tokens, tokenize);
  const ModelRanks ranks = start_model_ranks(parsed, arguments);
  const auto model = load_model(files, ranks, parsed.dtype);
  Chat(parsed, *model, tokenize, std::move(end_tokens)).run();
  return 0;
}

}  // namespace phalanx::cli
