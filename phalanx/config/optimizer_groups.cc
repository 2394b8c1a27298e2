#include "phalanx/config/optimizer_groups.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"
#include "phalanx/config/config_schema.h"
#include "phalanx/config/optimizer_groups_reader.h"
#include "phalanx/config/slot_text.h"
#include "phalanx/config/table_lists.h"

namespace phalanx::config {
namespace {

/// Reads one table. `where` begins its messages.
class GroupReader {
 public:
  GroupReader(const toml::table& table, std::string where) : table_(table), where_(std::move(where)) {}

  OptimizerGroup read() const {
    static const std::vector<std::string> known = {"params", "lr_factor", "weight_decay"};
    for (auto&& [name, value] : table_) {
      const std::string key(name.str());
      if (std::ranges::find(known, key) != known.end()) continue;
      throw ConfigError(fmt::format("{}: unknown key {}{}; a group has {}", where_, key, did_you_mean(key, known),
                                    fmt::join(known, ", ")));
    }
    OptimizerGroup group{.params = params()};
    if (const auto factor = number("lr_factor")) {
      if (!(*factor > 0)) {
        fail(fmt::format("lr_factor is {}: expected a number above 0; [training] frozen names what is not trained",
                         *factor));
      }
      group.lr_factor = *factor;
    }
    group.weight_decay = number("weight_decay");
    if (group.weight_decay && !(*group.weight_decay >= 0)) {
      fail(fmt::format("weight_decay is {}: expected 0 or a positive number", *group.weight_decay));
    }
    if (!table_.contains("lr_factor") && !group.weight_decay) {
      fail("sets nothing: expected lr_factor, weight_decay or both");
    }
    return group;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw ConfigError(fmt::format("{}: {}", where_, what)); }

  std::vector<std::string> params() const {
    std::vector<std::string> patterns;
    const toml::array* const list = table_["params"].as_array();
    for (std::size_t i = 0; list != nullptr && i < list->size(); ++i) {
      const auto pattern = list->get(i)->value<std::string>();
      if (pattern && !pattern->empty()) patterns.push_back(*pattern);
    }
    if (list != nullptr && !list->empty() && patterns.size() == list->size()) return patterns;
    fail("params is no list of patterns: expected those of its parameters' names, as [\"*norm*\"]");
  }

  std::optional<double> number(const char* key) const {
    const toml::node* const node = table_.get(key);
    if (node == nullptr) return std::nullopt;
    const auto value = node->is_number() ? node->value<double>() : std::nullopt;
    if (!value || !std::isfinite(*value)) fail(fmt::format("{} is no finite number", key));
    return value;
  }

  const toml::table& table_;
  std::string where_;
};

}  // namespace

OptimizerGroups read_optimizer_groups(const toml::array& tables, std::string_view label, const std::string& source,
                                      bool is_file) {
  OptimizerGroups groups;
  const TableList list{.label = label, .source = source, .is_file = is_file, .kind = "group", .expected = "params"};
  each_table(tables, list, [&](const toml::table& table, const std::string& where) {
    groups.push_back(GroupReader(table, where).read());
  });
  return groups;
}

OptimizerGroups read_optimizer_groups(const std::string& text, std::string_view label, const std::string& flag) {
  toml::table root;
  const toml::array& tables = tables_in_flag(root, text, flag, R"([{params = ["*norm*"], lr_factor = 0.1}])");
  return read_optimizer_groups(tables, label, flag, /*is_file=*/false);
}

void to_json(nlohmann::json& json, const OptimizerGroup& group) {
  json = {{"params", group.params}, {"lr_factor", group.lr_factor}};
  if (group.weight_decay) json["weight_decay"] = *group.weight_decay;
}

std::string optimizer_groups_toml(const OptimizerGroups& groups) {
  std::vector<std::string> tables;
  for (OptimizerGroup group : groups) {
    std::string table =
        fmt::format("params = {}, lr_factor = {}", toml_value(&group.params), toml_value(&group.lr_factor));
    if (group.weight_decay) table += fmt::format(", weight_decay = {}", toml_value(&*group.weight_decay));
    tables.push_back("{" + table + "}");
  }
  return fmt::format("[{}]", fmt::join(tables, ", "));
}

}  // namespace phalanx::config
