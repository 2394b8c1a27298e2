#include "phalanx/data/blended_loader.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/data/stream_description.h"

namespace phalanx::data {
namespace {

using nlohmann::json;

std::vector<double> weights_of(const std::vector<BlendedLoader::Part>& parts) {
  std::vector<double> weights;
  for (const auto& part : parts) weights.push_back(part.weight);
  return weights;
}

std::vector<std::string> names_of(const std::vector<BlendedLoader::Part>& parts) {
  std::vector<std::string> names;
  for (const auto& part : parts) names.push_back(part.name);
  return names;
}

/// The sets of a saved blend. Throws DataError if it is malformed.
struct SavedBlend {
  std::vector<std::string> names;
  std::vector<std::int64_t> shares;
  std::vector<json> streams;
  std::int64_t seq_len = 0;
};

SavedBlend saved_blend(const json& saved) {
  try {
    SavedBlend blend{.seq_len = saved.at("seq_len")};
    for (const json& set : saved.at("sets")) {
      blend.names.push_back(set.at("name"));
      blend.shares.push_back(set.at("share"));
      blend.streams.push_back(set.at("stream"));
    }
    if (blend.seq_len < 1 || blend.names.empty())
      throw DataError("the checkpoint's description of its data is of no stream");
    return blend;
  } catch (const json::exception&) {
    throw DataError(
        "the checkpoint's description of its data is malformed: expected seq_len and sets, each with name, "
        "share and stream");
  }
}

}  // namespace

std::uint64_t seed_of_set(std::uint64_t seed, std::size_t set) {
  if (set == 0) return seed;
  // splitmix64: neighbouring numbers become unrelated ones.
  std::uint64_t mixed = seed + 0x9E3779B97F4A7C15ULL * static_cast<std::uint64_t>(set);
  mixed = (mixed ^ (mixed >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  mixed = (mixed ^ (mixed >> 27U)) * 0x94D049BB133111EBULL;
  return mixed ^ (mixed >> 31U);
}

BlendedLoader::BlendedLoader(std::vector<Part> parts, std::int64_t global_batch_size)
    : parts_(std::move(parts)), global_batch_size_(global_batch_size), schedule_(weights_of(parts_), names_of(parts_)) {
  if (global_batch_size < 1)
    throw ConfigError(fmt::format("global_batch_size {} must be 1 or more", global_batch_size));
}

std::int64_t BlendedLoader::number_of(std::int64_t step, std::int64_t row) const {
  const std::int64_t number = first_row_ + (step - first_step_) * global_batch_size_ + row;
  if (step >= first_step_) return number;
  throw ConfigError(fmt::format("step {}: expected one from {} on, where the data begin", step, first_step_));
}

std::vector<std::int32_t> BlendedLoader::fill(std::int64_t step, RowRange rows, std::span<std::int64_t> inputs,
                                              std::span<std::int64_t> labels) const {
  check_request(step, rows, inputs.size(), labels.size());
  const auto seq = static_cast<std::size_t>(seq_len());
  std::vector<std::int32_t> ends;
  if (separates_documents()) ends.push_back(0);
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    const auto [set, number] = schedule_.row(number_of(step, row));
    const std::size_t at = static_cast<std::size_t>(row - rows.begin) * seq;
    const auto of_row = parts_[static_cast<std::size_t>(set)].rows.fill(number, {0, 1}, inputs.subspan(at, seq),
                                                                        labels.subspan(at, seq));
    for (std::size_t i = 1; i < of_row.size(); ++i) ends.push_back(static_cast<std::int32_t>(at) + of_row[i]);
  }
  return ends;
}

std::int64_t BlendedLoader::label_count(std::int64_t step) const {
  std::int64_t sum = 0;
  for (std::int64_t row = 0; row < global_batch_size_; ++row) {
    const auto [set, number] = schedule_.row(number_of(step, row));
    sum += parts_[static_cast<std::size_t>(set)].rows.label_count(number);
  }
  return sum;
}

json BlendedLoader::describe() const {
  json sets = json::array();
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    sets.push_back(
        {{"name", parts_[i].name}, {"share", schedule_.shares()[i]}, {"stream", describe_stream(parts_[i].rows)}});
  }
  return {{"version", kBlendVersion}, {"seq_len", seq_len()}, {"sets", sets}};
}

std::map<std::string, std::int64_t> BlendedLoader::saved_position(std::int64_t step) const {
  return {{kTokensRead, number_of(step, 0) * seq_len()}};
}

StreamResume BlendedLoader::resume(const json& saved, const std::map<std::string, std::int64_t>& saved_position) const {
  StreamResume resume;
  const std::int64_t tokens = tokens_in(saved_position);
  if (stream_version(saved) != kBlendVersion) {
    resume.differences.push_back(fmt::format("[[training.datasets]]: the checkpoint's run read {}; this one blends {}",
                                             stream_text(saved), fmt::join(names_of(parts_), ", ")));
    return resume;
  }
  const SavedBlend before = saved_blend(saved);
  const auto differs = [&](const std::string& key, const std::string& was, const std::string& is) {
    resume.differences.push_back(fmt::format("{}: the checkpoint's run read {}; this one reads {}", key, was, is));
  };
  const auto text = [](const std::vector<std::string>& names, const std::vector<std::int64_t>& shares) {
    std::vector<std::string> sets;
    for (std::size_t i = 0; i < names.size(); ++i) sets.push_back(fmt::format("{} of '{}'", shares[i], names[i]));
    return fmt::format("{}", fmt::join(sets, ", "));
  };
  if (before.shares != schedule_.shares()) {
    differs("[[training.datasets]] weight", text(before.names, before.shares),
            text(names_of(parts_), schedule_.shares()));
  }
  for (std::size_t i = 0; i < parts_.size() && before.streams.size() == parts_.size(); ++i) {
    const std::string label = fmt::format("data set {} ('{}'): ", i + 1, parts_[i].name);
    for (const std::string& difference : stream_differences(before.streams[i], describe_stream(parts_[i].rows))) {
      resume.differences.push_back(label + difference);
    }
    if (before.names[i] != parts_[i].name) {
      resume.notes.push_back(
          fmt::format("data set {} was called '{}' and is now '{}'", i + 1, before.names[i], parts_[i].name));
    }
  }
  if (before.seq_len != seq_len() && tokens != 0) {
    differs("[training] seq_len", fmt::format("{} tokens a sequence", before.seq_len),
            fmt::format("{}, and the sets of a blend go on only after whole sequences", seq_len()));
  }
  if (!resume.differences.empty()) return resume;
  if (tokens < 0 || tokens % seq_len() != 0) {
    throw DataError(
        fmt::format("the checkpoint's data position of {} tokens is inside a sequence of {}", tokens, seq_len()));
  }
  resume.position.token = tokens;
  return resume;
}

void BlendedLoader::begin_at(std::int64_t step, StreamPosition position) {
  if (position.epoch != 0 || position.token < 0 || position.token % seq_len() != 0) {
    throw ConfigError(fmt::format("epoch {}, token {}: rows of a blend are of epoch 0 and begin at multiples of {}",
                                  position.epoch, position.token, seq_len()));
  }
  first_step_ = step;
  first_row_ = position.token / seq_len();
}

std::vector<std::pair<std::string, std::string>> BlendedLoader::in_words() const {
  std::vector<std::pair<std::string, std::string>> lines;
  for (const Part& part : parts_) {
    lines.emplace_back(fmt::format("data '{}'", part.name), part.rows.tokens().description());
  }
  return lines;
}

std::vector<SetCount> BlendedLoader::counts_before(std::int64_t step) const {
  std::vector<SetCount> counts;
  const std::vector<std::int64_t> rows = schedule_.counts(step < first_step_ ? first_row_ : number_of(step, 0));
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    counts.push_back({.name = parts_[i].name,
                      .sequences = rows[i],
                      .epochs = static_cast<double>(rows[i]) / static_cast<double>(parts_[i].rows.sample_count())});
  }
  return counts;
}

void BlendedLoader::each_file(const std::function<void(const std::string&, const DataLoader&)>& use) const {
  for (const Part& part : parts_) use(part.name, part.rows);
}

}  // namespace phalanx::data
