// phalanx tokenize INPUT...: trains a tokenizer on text files and turns them into token files.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int tokenize_command(const Arguments& arguments);
extern const std::string_view kTokenizeHelp;

}  // namespace phalanx::cli
