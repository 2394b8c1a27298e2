// ParameterGroup: parameters, named by patterns, with a learning rate or a weight decay of their own.
//
//   AdamW optimizer(parameters, {.groups = {{.params = {"*lora_B*"}, .lr_factor = 16},
//                                           {.params = {"*norm*"}, .weight_decay = 0.0}}});
//   optimizer.step(lr);                     // of the first group: 16 * lr
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace phalanx {

struct ParameterGroup {
  std::vector<std::string> params;     // patterns of names: name_patterns.h
  double lr_factor = 1;                // multiplies the rate of every step
  std::optional<double> weight_decay;  // unset: the optimizer's
};

/// What one parameter's steps are made with.
struct ParameterSettings {
  double lr_factor = 1;
  double weight_decay = 0;
};

/// By name. A name that no group has gets `weight_decay`, or 0 if a pattern of `no_decay` matches it.
/// Throws a ConfigError that begins with `who`: for a pattern that matches no name, a name that two groups have or that
/// both `no_decay` and a group give a weight decay, a rate factor that is not positive or a negative weight decay.
std::vector<ParameterSettings> settings_by_name(const std::string& who, const std::vector<std::string>& names,
                                                double weight_decay, const std::vector<std::string>& no_decay,
                                                const std::vector<ParameterGroup>& groups);

}  // namespace phalanx
