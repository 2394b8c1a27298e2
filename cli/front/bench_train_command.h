// phalanx bench train: the same training for a few steps under several layouts, beside one rank.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

/// Arguments after `bench train`.
int bench_train_command(const Arguments& arguments);
extern const std::string_view kBenchTrainHelp;

}  // namespace phalanx::cli
