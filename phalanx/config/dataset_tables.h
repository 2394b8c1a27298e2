// [[training.datasets]] and [[validation.datasets]]: one table for each token file.
//
//   [[training.datasets]]
//   path = "data/web"
//   weight = 0.7
//   [[training.datasets]]
//   path = "data/code"
//   weight = 0.3
//   name = "code"
//   range = [0, 50000000]
//
// On the command line the same as inline tables: --training.datasets '[{path = "data/web", weight = 0.7}]'.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace phalanx::config {

struct Dataset {
  std::string path;
  std::optional<double> weight;
  std::string name;  // unique among the sets; read from the path where it is not given
  struct Range {
    std::int64_t begin = 0, end = 0;
    friend bool operator==(const Range&, const Range&) = default;
  };
  std::optional<Range> range;  // of tokens; unset: all
  friend bool operator==(const Dataset&, const Dataset&) = default;
};
using Datasets = std::vector<Dataset>;

void to_json(nlohmann::json& json, const Dataset& set);

/// As inline tables; "[]" for none.
std::string datasets_toml(const Datasets& sets);

}  // namespace phalanx::config
