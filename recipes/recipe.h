// What all recipes share: arguments, help, errors, the lines of all ranks in order, and (losses.h) comparing losses.
//
//   int main(int argc, char** argv) {
//     int steps = 5;
//     recipe::Program program;
//     program.add_option("--steps", steps)->check(CLI::Range(1, 1000));
//     return program.run(argc, argv, [&](const phalanx::ProcessContext& context) { return train(context, steps); });
//   }
#pragma once

#include <ATen/core/Tensor.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/launch/process_context.h"
#include "recipes/losses.h"

namespace recipe {

/// A recipe's command line. --help prints the first comment of the recipe's source, then the arguments. Every recipe
/// has --device (auto, cpu, cuda), and --spawn N, N,N,... or auto,
/// which starts so many ranks, one world after the other.
class Program : public CLI::App {
 public:
  Program();
  /// Adds --init-method (also --method), --rank, --world-size and --backend.
  void add_rendezvous_options();
  /// Adds --per-rank. Returns whether it was given: valid once run() calls its body.
  const bool& add_per_rank_flag();
  phalanx::InitOptions& init() { return init_; }

  /// Parses the arguments, finds the other ranks and calls `body`, which returns whether everything came out as it
  /// should. Returns the exit status: 0 if it did, 1 if not. An exception is one line on standard error. The status is
  /// 2 for a wrong argument (also UsageError and ConfigError of the body), otherwise 1.
  int run(int argc, char** argv, const std::function<bool(const phalanx::ProcessContext&)>& body);

 private:
  phalanx::InitOptions init_;
  std::vector<int> spawned_;
  bool per_rank_ = false;
};

/// Checks of options: a finite number above 0, and a whole number.
CLI::Validator positive();
CLI::Validator at_least(std::int64_t smallest);

/// Rank 0 prints every rank's text, in the order of the ranks, each line after "rank R: ". Collective.
void print_by_rank(phalanx::Communicator& world, const std::string& text);
/// Of each layer's activations: "rank R: NAME, layer I: SUMMARY".
void print_by_rank(phalanx::Communicator& world, const std::string& name, const std::vector<at::Tensor>& activations);

/// Shape and first values: "128 x 1024 [0.841 -0.159 0.345 ...]".
std::string summary(const at::Tensor& tensor);

/// A rank's share of `count` things; `what` names them. Throws UsageError if the ranks do not divide them: none is
/// dropped.
std::int64_t share_of(std::int64_t count, int ranks, std::string_view what = "rows of a batch");

}  // namespace recipe
