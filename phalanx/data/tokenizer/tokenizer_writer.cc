#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "phalanx/data/tokenizer/bpe_model.h"
#include "phalanx/data/tokenizer/byte_level.h"

namespace phalanx::data {
namespace {

using ordered = nlohmann::ordered_json;

ordered written(const TextPattern& pattern) { return {{pattern.is_regex ? "Regex" : "String", pattern.text}}; }

const char* name_of(SplitBehavior behavior) {
  constexpr const char* kNames[] = {"Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"};
  return kNames[static_cast<std::size_t>(behavior)];
}

/// Writes one component as the package writes it.
struct ComponentWriter {
  ordered operator()(const NormalFormStep& step) const {
    constexpr const char* kNames[] = {"NFC", "NFD", "NFKC", "NFKD"};
    return {{"type", kNames[static_cast<std::size_t>(step.form)]}};
  }
  ordered operator()(const PrependStep& step) const { return {{"type", "Prepend"}, {"prepend", step.text}}; }
  ordered operator()(const ReplaceStep& step) const {
    return {{"type", "Replace"}, {"pattern", written(step.pattern)}, {"content", step.content}};
  }
  ordered operator()(const LowercaseStep&) const { return {{"type", "Lowercase"}}; }
  ordered operator()(const StripSpacesStep& step) const {
    return {{"type", "Strip"}, {"strip_left", step.left}, {"strip_right", step.right}};
  }
  ordered operator()(const SplitStep& step) const {
    return {{"type", "Split"},
            {"pattern", written(step.pattern)},
            {"behavior", name_of(step.behavior)},
            {"invert", step.invert}};
  }
  ordered operator()(const MetaspaceStep& step) const {
    constexpr const char* kSchemes[] = {"first", "never", "always"};
    return {{"type", "Metaspace"},
            {"replacement", step.replacement},
            {"prepend_scheme", kSchemes[static_cast<std::size_t>(step.scheme)]},
            {"split", step.split}};
  }
  ordered operator()(const ByteLevelStep& step) const {
    return {{"type", "ByteLevel"},
            {"add_prefix_space", step.add_prefix_space},
            {"trim_offsets", true},
            {"use_regex", step.use_regex}};
  }
  ordered operator()(const ByteLevelDecode&) const {
    return {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}};
  }
  ordered operator()(const MetaspaceDecode& step) const {
    return {{"type", "Metaspace"},
            {"replacement", step.replacement},
            {"prepend_scheme", step.drops_first ? "always" : "never"},
            {"split", true}};
  }
  ordered operator()(const ByteFallbackDecode&) const { return {{"type", "ByteFallback"}}; }
  ordered operator()(const FuseDecode&) const { return {{"type", "Fuse"}}; }
  ordered operator()(const StripDecode& step) const {
    return {{"type", "Strip"}, {"content", step.content}, {"start", step.start}, {"stop", step.stop}};
  }
};

/// No step is written as null, one step alone, several as a Sequence.
template <typename Step>
ordered written(const std::vector<Step>& steps, const char* parts_key) {
  if (steps.empty()) return nullptr;
  if (steps.size() == 1) return std::visit(ComponentWriter(), steps[0]);
  ordered parts = ordered::array();
  for (const Step& step : steps) parts.push_back(std::visit(ComponentWriter(), step));
  return {{"type", "Sequence"}, {parts_key, std::move(parts)}};
}

ordered written_template(const BpeModel& model) {
  if (model.prefix.empty() && model.suffix.empty()) return nullptr;
  const auto text = [](const char* name, int type) { return ordered{{"Sequence", {{"id", name}, {"type_id", type}}}}; };
  ordered single = ordered::array(), pair = ordered::array(), tokens = ordered::object();
  const auto add = [&](ordered& pieces, const std::vector<TokenId>& ids, int type) {
    for (const TokenId id : ids) {
      std::string name = std::to_string(id);
      for (const AddedToken& token : model.added_tokens) {
        if (token.id == id) name = token.content;
      }
      pieces.push_back({{"SpecialToken", {{"id", name}, {"type_id", type}}}});
      tokens[name] = {{"id", name}, {"ids", {id}}, {"tokens", {name}}};
    }
  };
  for (ordered* pieces : {&single, &pair}) {
    add(*pieces, model.prefix, 0);
    pieces->push_back(text("A", 0));
    add(*pieces, model.suffix, 0);
  }
  add(pair, model.prefix, 1);
  pair.push_back(text("B", 1));
  add(pair, model.suffix, 1);
  return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", tokens}};
}

}  // namespace

std::string write_tokenizer_json(const BpeModel& model) {
  ordered root;
  root["version"] = "1.0";
  root["truncation"] = nullptr;
  root["padding"] = nullptr;
  root["added_tokens"] = ordered::array();
  std::vector<AddedToken> added = model.added_tokens;
  std::sort(added.begin(), added.end(), [](const AddedToken& a, const AddedToken& b) { return a.id < b.id; });
  for (const AddedToken& token : added) {
    root["added_tokens"].push_back({{"id", token.id},
                                    {"content", token.content},
                                    {"single_word", token.single_word},
                                    {"lstrip", token.lstrip},
                                    {"rstrip", token.rstrip},
                                    {"normalized", token.normalized},
                                    {"special", token.special}});
  }
  root["normalizer"] = written(model.normalizer, "normalizers");
  root["pre_tokenizer"] = written(model.pre_tokenizer, "pretokenizers");
  root["post_processor"] = written_template(model);
  root["decoder"] = written(model.decoder, "decoders");

  ordered vocab = ordered::object();
  std::vector<std::string> names(model.tokens.size());
  for (std::size_t id = 0; id < model.tokens.size(); ++id) {
    if (model.tokens[id].empty()) continue;
    names[id] = model.is_byte_level() ? bytes_to_printable(model.tokens[id]) : model.tokens[id];
  }
  // A special token whose content is not in the byte alphabet is written as it is.
  for (const AddedToken& token : added) {
    const auto index = static_cast<std::size_t>(token.id);
    if (index < names.size() && !names[index].empty() && model.tokens[index] == token.content)
      names[index] = token.content;
  }
  // Pushed as pairs: ordered_json's [] searches all keys each time.
  auto& members = vocab.get_ref<ordered::object_t&>();
  members.reserve(names.size());
  for (std::size_t id = 0; id < names.size(); ++id) {
    if (!names[id].empty())
      static_cast<std::vector<std::pair<const std::string, ordered>>&>(members).emplace_back(names[id], id);
  }
  // "left right" rather than ["left", "right"]: every version of `tokenizers` reads it, and no token has a space in it.
  ordered merges = ordered::array();
  for (const BpeMerge& merge : model.merges) {
    merges.push_back(names[static_cast<std::size_t>(merge.left)] + " " + names[static_cast<std::size_t>(merge.right)]);
  }
  root["model"] = {
      {"type", "BPE"},
      {"dropout", nullptr},
      {"unk_token", model.unknown ? ordered(names[static_cast<std::size_t>(*model.unknown)]) : ordered(nullptr)},
      {"continuing_subword_prefix", nullptr},
      {"end_of_word_suffix", nullptr},
      {"fuse_unk", model.fuse_unknown},
      {"byte_fallback", model.byte_fallback},
      {"ignore_merges", model.ignore_merges},
      {"vocab", std::move(vocab)},
      {"merges", std::move(merges)}};
  return root.dump(1, ' ') + "\n";
}

}  // namespace phalanx::data
