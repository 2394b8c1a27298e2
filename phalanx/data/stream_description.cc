#include "phalanx/data/stream_description.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>

#include "phalanx/base/error.h"

namespace phalanx::data {
namespace {

using nlohmann::json;

// 2: packed, which readers of version 1 do not know.
constexpr std::int64_t kStreamVersion = 1, kPackedStreamVersion = 2;

/// The values of a description. Throws DataError if it is malformed.
struct StreamValues {
  std::string name, type, content, index, mask;
  std::int64_t tokens = 0;
  TokenRange range;
  std::int64_t seq_len = 0;
  bool shuffle = false;
  std::uint64_t seed = 0;
  std::int64_t packed_rows = 0;  // of an epoch; 0: not packed
  bool pairs = false;            // documents are
};

StreamValues values_of(const json& saved) {
  const auto fail = [](const std::string& what) {
    throw DataError("the checkpoint's description of its data " + what);
  };
  try {
    StreamValues values{.name = saved.at("name"),
                        .type = saved.at("type"),
                        .content = saved.at("content"),
                        .index = saved.at("index"),
                        .tokens = saved.at("tokens"),
                        .range = {saved.at("range").at(0), saved.at("range").at(1)},
                        .seq_len = saved.at("seq_len"),
                        .shuffle = saved.at("shuffle"),
                        .seed = saved.at("seed")};
    values.mask = saved.value("mask", "");
    if (const auto packing = saved.find("packing"); packing != saved.end()) {
      if (packing->at("kind") != "best_fit") fail(fmt::format("has an unknown packing {}", packing->at("kind").dump()));
      values.packed_rows = packing->at("rows");
      if (values.packed_rows < 1) fail("is of no packed row");
      values.pairs = packing->value("pairs", false);
    }
    const bool is_too_short = values.packed_rows == 0 && values.range.size() <= values.seq_len;
    if (values.seq_len < 1 || values.range.begin < 0 || is_too_short) fail("is of no stream");
    return values;
  } catch (const json::exception&) {
    fail("is malformed: expected name, type, content, index, tokens, range, seq_len, shuffle and seed");
    throw;
  }
}

std::int64_t epoch_tokens(const StreamValues& values) {
  if (values.packed_rows > 0) return values.packed_rows * values.seq_len;
  return (values.range.size() - 1) / values.seq_len * values.seq_len;
}

/// `with_index`: for files that do not differ in their ids. `with_mask`: for those that differ in their masks too.
std::string file_text(const StreamValues& values, bool with_index, bool with_mask) {
  const auto part = [](const char* what, const std::string& hash) {
    return hash.empty() ? fmt::format(", no {}", what) : fmt::format(", {} {}", what, hash.substr(0, 12));
  };
  return fmt::format("{} ({} {} tokens, content {}{}{})", values.name, values.tokens, values.type,
                     values.content.substr(0, 12), with_index ? part("index", values.index) : "",
                     with_mask ? part("mask", values.mask) : "");
}

std::string order_text(const StreamValues& values) {
  return values.shuffle ? fmt::format("shuffled by seed {}", values.seed) : std::string("in order");
}

std::vector<std::string> differences_of(const StreamValues& saved, const StreamValues& now) {
  std::vector<std::string> found;
  const auto add = [&](const char* key, const std::string& before, const std::string& after) {
    found.push_back(fmt::format("{}: the checkpoint's run read {}; this one reads {}", key, before, after));
  };
  const bool same_ids = saved.tokens == now.tokens && saved.type == now.type && saved.content == now.content;
  const bool same_mask = saved.mask == now.mask, same_file = same_ids && saved.index == now.index && same_mask;
  if (!same_file) {
    add("[training] dataset_path", file_text(saved, same_ids, !same_mask), file_text(now, same_ids, !same_mask));
  }
  if (saved.range != now.range && same_file) {
    const auto text = [](TokenRange range) { return fmt::format("tokens [{}, {})", range.begin, range.end); };
    add("[validation] enable, fraction or dataset_path, or a range of a data set", text(saved.range), text(now.range));
  }
  const auto packing = [](const StreamValues& values) {
    return values.pairs             ? "pairs of documents, packed by best fit"
           : values.packed_rows > 0 ? "whole documents, packed by best fit"
                                    : "consecutive tokens";
  };
  if ((saved.packed_rows > 0) != (now.packed_rows > 0) || saved.pairs != now.pairs) {
    add("[training] packing", packing(saved), packing(now));
  } else if (same_file && saved.range == now.range && saved.seq_len == now.seq_len &&
             saved.packed_rows != now.packed_rows) {
    // Another version of Phalanx has put other documents together.
    add("[training] packing", fmt::format("{} packed sequences", saved.packed_rows),
        fmt::format("{} of the same documents", now.packed_rows));
  }
  if (saved.shuffle != now.shuffle) {
    add("[training] shuffle", order_text(saved), order_text(now));
  } else if (saved.shuffle && saved.seed != now.seed) {
    add("[debug] seed", order_text(saved), order_text(now));
  }
  return found;
}

}  // namespace

std::int64_t stream_version(const json& saved) {
  constexpr const char* kWhat = "the checkpoint's description of its data";
  if (!saved.is_object()) throw DataError(fmt::format("{} is no JSON object", kWhat));
  const auto version = saved.find("version");
  for (const std::int64_t known : {kStreamVersion, kPackedStreamVersion, kBlendVersion, kTextStreamVersion}) {
    if (version != saved.end() && *version == known) return known;
  }
  throw DataError(fmt::format("{} is of version {}: expected {} to {}; a later version of Phalanx wrote it", kWhat,
                              version == saved.end() ? "none" : version->dump(), kStreamVersion, kTextStreamVersion));
}

std::string stream_text(const json& saved) {
  const std::int64_t version = stream_version(saved);
  if (version == kTextStreamVersion) return "texts";
  if (version != kBlendVersion) return values_of(saved).name;
  std::vector<std::string> names;
  for (const json& set : saved.value("sets", json::array())) {
    if (set.is_object()) names.push_back(set.value("name", json()).dump());
  }
  return fmt::format("a blend of {}", fmt::join(names, ", "));
}

std::vector<std::string> stream_differences(const json& saved, const json& now) {
  stream_version(saved);
  return differences_of(values_of(saved), values_of(now));
}

std::int64_t tokens_in(const std::map<std::string, std::int64_t>& saved_position) {
  const auto tokens = saved_position.find(kTokensRead);
  if (tokens != saved_position.end()) return tokens->second;
  throw DataError(
      fmt::format("the checkpoint does not say how much of the data has been read ({} of its manifest)", kTokensRead));
}

json describe_stream(const DataLoader& dataloader) {
  const TokenFile& tokens = dataloader.tokens();
  const PackedRows* const packed = dataloader.packed_rows();
  json description = {{"version", packed != nullptr ? kPackedStreamVersion : kStreamVersion},
                      {"name", std::filesystem::path(tokens.path()).filename().string()},
                      {"format", to_string(tokens.format())},
                      {"type", to_string(tokens.type())},
                      {"tokens", tokens.size()},
                      {"content", tokens.content_hash()},
                      {"index", tokens.index_hash()},
                      {"range", {dataloader.range().begin, dataloader.range().end}},
                      {"seq_len", dataloader.seq_len()},
                      {"shuffle", dataloader.options().shuffle},
                      {"seed", dataloader.options().seed}};
  if (!tokens.mask_hash().empty()) description["mask"] = tokens.mask_hash();
  if (packed != nullptr) description["packing"] = {{"kind", "best_fit"}, {"rows", packed->row_count()}};
  if (dataloader.options().pairs) description["packing"]["pairs"] = true;
  return description;
}

json describe_range(const TokenFile& tokens, TokenRange range) {
  json description = {{"name", std::filesystem::path(tokens.path()).filename().string()},
                      {"tokens", tokens.size()},
                      {"content", tokens.content_hash()},
                      {"range", {range.begin, range.end}}};
  if (!tokens.mask_hash().empty()) description["mask"] = tokens.mask_hash();
  return description;
}

std::int64_t tokens_read(const DataLoader& dataloader, std::int64_t step) {
  const StreamPosition position = dataloader.position_of(step);
  return position.epoch * dataloader.epoch_tokens() + position.token;
}

StreamResume resume_stream(const json& saved, std::int64_t tokens, const DataLoader& dataloader) {
  if (const auto version = stream_version(saved); version == kBlendVersion || version == kTextStreamVersion) {
    return {.position = {},
            .differences = {fmt::format("[training] dataset_path: the checkpoint's run read {}; this one reads {}",
                                        stream_text(saved), values_of(describe_stream(dataloader)).name)},
            .notes = {}};
  }
  const StreamValues before = values_of(saved), now = values_of(describe_stream(dataloader));
  StreamResume resume{.differences = differences_of(before, now)};
  if (tokens < 0) throw DataError(fmt::format("the checkpoint's data position is {} tokens", tokens));
  if (!resume.differences.empty()) return resume;
  const StreamPosition position{.epoch = tokens / epoch_tokens(before), .token = tokens % epoch_tokens(before)};
  if (before.seq_len != now.seq_len) {
    const std::string lengths =
        fmt::format("[training] seq_len: the checkpoint's run read {} tokens a sequence; this one reads {}",
                    before.seq_len, now.seq_len);
    if ((now.shuffle || now.packed_rows > 0) && position.token != 0) {
      resume.differences.push_back(
          fmt::format("{}, and epoch {} is {} in sequences of {}, of which {} of {} have been read", lengths,
                      position.epoch + 1, now.packed_rows > 0 ? "packed" : "shuffled", before.seq_len,
                      position.token / before.seq_len, epoch_tokens(before) / before.seq_len));
      return resume;
    }
    resume.notes.push_back(
        fmt::format("{}: it goes on at token {} of epoch {}", lengths, position.token, position.epoch + 1));
  }
  if ((now.shuffle || now.packed_rows > 0) && position.token % now.seq_len != 0) {
    throw DataError(
        fmt::format("the checkpoint's data position of {} tokens is inside a sequence of {}", tokens, now.seq_len));
  }
  resume.position = position;
  return resume;
}

}  // namespace phalanx::data
