// phalanx bench train: runs the same training for a few steps under several layouts and on one rank.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

/// `arguments`: those after `bench train`.
int bench_train_command(const Arguments& arguments);
extern const std::string_view kBenchTrainHelp;

}  // namespace phalanx::cli
