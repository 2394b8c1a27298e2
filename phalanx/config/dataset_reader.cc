#include "phalanx/config/dataset_reader.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"
#include "phalanx/config/config_schema.h"
#include "phalanx/config/slot_text.h"
#include "phalanx/config/table_lists.h"

namespace phalanx::config {
namespace {

const std::vector<std::string>& known_names() {
  static const std::vector<std::string> names = {"path", "weight", "name", "range"};
  return names;
}

/// Reads one table. `where` begins its messages.
class TableReader {
 public:
  TableReader(const toml::table& table, std::string where) : table_(table), where_(std::move(where)) {}

  Dataset read() const {
    for (auto&& [name, value] : table_) {
      const std::string key(name.str());
      if (std::ranges::find(known_names(), key) != known_names().end()) continue;
      throw ConfigError(fmt::format("{}: unknown key {}{}; a data set has {}", where_, key,
                                    did_you_mean(key, known_names()), fmt::join(known_names(), ", ")));
    }
    Dataset set;
    set.path = text("path").value_or("");
    if (set.path.empty()) fail("has no path: expected that of its token file; `phalanx tokenize` makes one");
    if (table_.contains("weight")) {
      set.weight = table_.get("weight")->value<double>();  // of integers, too
      if (!set.weight || !std::isfinite(*set.weight) || *set.weight <= 0) {
        fail(fmt::format("weight is {}: expected a number above 0; leave out a set of which nothing is to be read",
                         set.weight ? fmt::format("{}", *set.weight) : std::string("no number")));
      }
    }
    set.name = text("name").value_or(name_from(set.path));
    const auto is_control = [](unsigned char c) { return c < 0x20 || c == 0x7f; };
    if (set.name.empty() || std::ranges::any_of(set.name, is_control)) {
      fail("name is empty or holds control characters: expected a short name for the log");
    }
    if (table_.contains("range")) set.range = range();
    return set;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw ConfigError(fmt::format("{}: {}", where_, what)); }

  std::optional<std::string> text(const char* key) const {
    const toml::node* const node = table_.get(key);
    if (node == nullptr) return std::nullopt;
    if (!node->is_string()) fail(fmt::format("{} is no string", key));
    return node->value<std::string>();
  }

  Dataset::Range range() const {
    const toml::array* const ends = table_.get("range")->as_array();
    const bool are_two =
        ends != nullptr && ends->size() == 2 && ends->get(0)->is_integer() && ends->get(1)->is_integer();
    if (are_two) {
      const Dataset::Range range{*ends->get(0)->value<std::int64_t>(), *ends->get(1)->value<std::int64_t>()};
      if (range.begin >= 0 && range.begin < range.end) return range;
    }
    fail(
        "range is not [begin, end] with 0 <= begin < end: expected the tokens to read, as [0, 1000000]; the end is not "
        "read");
  }

  static std::string name_from(const std::string& path) {
    std::filesystem::path file = std::filesystem::path(path).lexically_normal();
    if (!file.has_filename()) file = file.parent_path();
    return (file.extension() == ".bin" || file.extension() == ".idx" ? file.stem() : file.filename()).string();
  }

  const toml::table& table_;
  std::string where_;
};

}  // namespace

Datasets read_datasets(const toml::array& tables, std::string_view label, const std::string& source, bool is_file) {
  Datasets sets;
  const TableList list{.label = label, .source = source, .is_file = is_file, .kind = "set", .expected = "a path"};
  each_table(tables, list, [&](const toml::table& table, const std::string& where) {
    Dataset set = TableReader(table, where).read();
    const auto same = std::ranges::find(sets, set.name, &Dataset::name);
    if (same != sets.end()) {
      throw ConfigError(
          fmt::format("{}: '{}' is the name of {}, too: give it another name", where, set.name, same->path));
    }
    sets.push_back(std::move(set));
  });
  return sets;
}

Datasets read_datasets(const std::string& text, std::string_view label, const std::string& flag) {
  toml::table root;
  const toml::array& tables = tables_in_flag(root, text, flag, R"([{path = "data/a", weight = 0.7}])");
  return read_datasets(tables, label, flag, /*is_file=*/false);
}

void to_json(nlohmann::json& json, const Dataset& set) {
  json = {{"path", set.path}, {"name", set.name}};
  if (set.weight) json["weight"] = *set.weight;
  if (set.range) json["range"] = {set.range->begin, set.range->end};
}

std::string datasets_toml(const Datasets& sets) {
  std::vector<std::string> tables;
  for (Dataset set : sets) {
    std::string table = fmt::format("path = {}, name = {}", toml_value(&set.path), toml_value(&set.name));
    if (set.weight) table += fmt::format(", weight = {}", toml_value(&*set.weight));
    if (set.range) table += fmt::format(", range = [{}, {}]", set.range->begin, set.range->end);
    tables.push_back("{" + table + "}");
  }
  return fmt::format("[{}]", fmt::join(tables, ", "));
}

}  // namespace phalanx::config
