// Lists the settings of a Hugging Face config.json that Phalanx does not support although the logits are still those of
// transformers: dropout, another range of initial weights, keys that nothing here reads. (hf_config.h refuses settings
// that would change the logits.)
//
//   log::info(hf_unsupported(text, "Llama-3.2-1B/config.json"));
//   // Llama-3.2-1B/config.json: not honoured: attention_dropout 0.1 (there is no dropout); not read: my_key
#pragma once

#include <string>

namespace phalanx::models {

/// Returns one line, empty if there is nothing to report. Throws CheckpointError if the text is not a JSON object.
/// `file` begins the messages.
std::string hf_unsupported(const std::string& text, const std::string& file);

}  // namespace phalanx::models
