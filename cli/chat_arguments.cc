#include "cli/chat_arguments.h"

#include <fmt/format.h>

#include "cli/parse_options.h"
#include "phalanx/base/error.h"

namespace phalanx::cli {

const std::string_view kChatHelp =
    R"(usage: phalanx chat MODEL_FOLDER [options]

A conversation with a model that was trained for chats, by its own chat template. Each line of input is a message; the
answer appears as it is made, and both stay in the conversation. Ctrl-C stops an answer, which stays as far as it came;
a second time, or while nothing is being said, it ends the program, as the end of the input does.

  /new                     forgets the conversation
  /exit                    ends the program

  MODEL_FOLDER             a Hugging Face directory, a run's folder, or one of its checkpoints; the chat template is
                           beside its tokenizer (docs/chat.md)
  --system TEXT            what the system message says
  --variables JSON         further variables of the template, such as '{"enable_thinking": false}'
  --chat-template NAME     where the model has several: which one
  --adapter DIR            an adapter of the model, as PEFT saves it: a folder with adapter_config.json (docs/lora.md)
  --allow-base-mismatch    use it although it was trained on other weights than those of this model
  --tokenizer FILE         tokenizer.json; where not given, looked for beside the checkpoint and in the run's folder
  --allow-tokenizer-mismatch  go on, with a warning, although the tokenizer is another one than the model was
                           trained with
  --allow-model-mismatch   take config.json's word where weights that Phalanx wrote say that they are of another model

  --max-new-tokens N       at most this many tokens an answer (default 1024)
  --temperature T          below 1 more predictable, above 1 more varied; 0 is --greedy (default 1)
  --top-k K                draw from the K likeliest tokens only (default 0: all)
  --top-p P                draw from the likeliest tokens that make up probability P only (default 1: all)
  --repetition-penalty R   above 1: tokens that were there already become less likely (default 1)
  --greedy                 always the likeliest token
  --seed N                 of the draws: the same seed and messages give the same answers (default 0)
  --stop TEXT              end an answer before this text; may be repeated

  --dtype TYPE             float32, bfloat16 or float16: of weights and computing (default float32)
  --device DEVICE          cpu, cuda or cuda:N (default: cuda where there is one)
  --quiet                  no speeds

  phalanx chat SmolLM2-135M-Instruct --system "Answer in one sentence." --temperature 0.7 --top-p 0.9
  echo "What is a communicator?" | phalanx chat outputs/chat --greedy --quiet
)";

ChatArguments parse_chat_arguments(const Arguments& arguments) {
  ChatArguments parsed;
  parsed.max_new_tokens = 1024;
  CLI::App app;
  app.add_option("model", parsed.checkpoint);
  app.add_option("--system", parsed.system);
  app.add_option("--variables", parsed.variables);
  app.add_option("--chat-template", parsed.chat_template);
  app.add_option("--adapter", parsed.adapter);
  app.add_flag("--allow-base-mismatch", parsed.allow_base_mismatch);
  app.add_option("--tokenizer", parsed.tokenizer);
  app.add_flag("--allow-tokenizer-mismatch", parsed.allow_tokenizer_mismatch);
  app.add_flag("--allow-model-mismatch", parsed.allow_model_mismatch);
  app.add_option("--dtype", parsed.dtype);
  app.add_option("--device", parsed.device);
  app.add_flag("--quiet,-q", parsed.quiet);
  add_sampling_options(app, parsed);
  parse_options(app, arguments);
  if (parsed.checkpoint.empty()) throw UsageError("the model's folder is missing: phalanx chat MODEL_FOLDER");
  require_adapter_for_base(parsed);
  parsed.dtype = dtype_option("--dtype", parsed.dtype);
  check_sampling_options(parsed);
  return parsed;
}

}  // namespace phalanx::cli
