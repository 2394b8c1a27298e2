// Prints the losses of several ways to train one model, and how far they are from each other.
//
//   const bool same = recipe::print_beside_one_rank(world.size(), {{"cut", cut}, {"one rank", whole}});
#pragma once

#include <string>
#include <vector>

namespace recipe {

/// The losses of one way to train.
struct Losses {
  std::string name;
  std::vector<double> values;  // by step
};

/// Prints a line a step with the losses of all ways. Returns the largest relative difference from the last way, which
/// is infinite if a loss is not a number.
double print_losses(const std::vector<Losses>& ways);

/// Prints these losses, and whether all ways have those of the last one, one rank's, within 1e-5. Returns that.
bool print_beside_one_rank(int ranks, const std::vector<Losses>& ways);

/// "the same" or "NOT the same", for the last line of a recipe.
const char* verdict(bool same);

}  // namespace recipe
