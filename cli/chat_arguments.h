// The command line of `phalanx chat`, parsed by the front program and by the worker. It uses no tensors.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/command.h"
#include "cli/model_arguments.h"
#include "cli/sampling_arguments.h"

namespace phalanx::cli {

extern const std::string_view kChatHelp;

struct ChatArguments : ModelArguments, SamplingArguments {
  std::string system;         // the first message; empty: none
  std::string variables;      // of the template, a JSON object; empty: none
  std::string chat_template;  // its name, where the model has several
};

/// Throws UsageError or ConfigError.
ChatArguments parse_chat_arguments(const Arguments& arguments);

}  // namespace phalanx::cli
