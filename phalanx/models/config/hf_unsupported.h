// What a Hugging Face config.json says and this program does not do, where the logits stay those of transformers:
// dropout, another range of initial weights, keys that nothing here reads. (What would change the logits is refused,
// hf_config.h.)
//
//   log::info(hf_unsupported(text, "Llama-3.2-1B/config.json"));
//   // Llama-3.2-1B/config.json: not honoured: attention_dropout 0.1 (there is no dropout); not read: my_key
#pragma once

#include <string>

namespace phalanx::models {

/// One line; empty where there is nothing to say. CheckpointError where the text is not a JSON object; `file` begins
/// the messages.
std::string hf_unsupported(const std::string& text, const std::string& file);

}  // namespace phalanx::models
