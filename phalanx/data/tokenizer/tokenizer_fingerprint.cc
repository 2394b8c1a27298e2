#include "phalanx/data/tokenizer/tokenizer_fingerprint.h"

#include <algorithm>
#include <string_view>
#include <variant>
#include <vector>

#include "phalanx/base/content_hash.h"
#include "phalanx/base/error.h"
#include "phalanx/data/tokenizer/bpe_model.h"

namespace phalanx::data {
namespace {

constexpr std::string_view kFingerprintVersion = "tok1:";

/// Adds steps to a hash, each by its name and all of its fields. The meaning of what is hashed here must never change:
/// a change is a new version.
struct StepHasher {
  ContentHash& hash;

  void pattern(const TextPattern& pattern) const { hash.add(pattern.text).add(std::int64_t{pattern.is_regex}); }

  void operator()(const NormalFormStep& step) const { hash.add("form").add(static_cast<std::int64_t>(step.form)); }
  void operator()(const PrependStep& step) const { hash.add("prepend").add(step.text); }
  void operator()(const ReplaceStep& step) const {
    hash.add("replace").add(step.content);
    pattern(step.pattern);
  }
  void operator()(const LowercaseStep& /*step*/) const { hash.add("lowercase"); }
  void operator()(const StripSpacesStep& step) const {
    hash.add("strip spaces").add(std::int64_t{step.left}).add(std::int64_t{step.right});
  }
  void operator()(const SplitStep& step) const {
    hash.add("split").add(static_cast<std::int64_t>(step.behavior)).add(std::int64_t{step.invert});
    pattern(step.pattern);
  }
  void operator()(const MetaspaceStep& step) const {
    hash.add("metaspace")
        .add(step.replacement)
        .add(static_cast<std::int64_t>(step.scheme))
        .add(std::int64_t{step.split});
  }
  void operator()(const ByteLevelStep& step) const {
    hash.add("bytes").add(std::int64_t{step.add_prefix_space}).add(std::int64_t{step.use_regex});
  }
  void operator()(const ByteLevelDecode& /*step*/) const { hash.add("bytes"); }
  void operator()(const MetaspaceDecode& step) const {
    hash.add("metaspace").add(step.replacement).add(std::int64_t{step.drops_first});
  }
  void operator()(const ByteFallbackDecode& /*step*/) const { hash.add("byte fallback"); }
  void operator()(const FuseDecode& /*step*/) const { hash.add("fuse"); }
  void operator()(const StripDecode& step) const { hash.add("strip").add(step.content).add(step.start).add(step.stop); }

  template <class Steps>
  void all(const char* name, const Steps& steps) const {
    hash.add(name).add(static_cast<std::int64_t>(steps.size()));
    for (const auto& step : steps) std::visit(*this, step);
  }
};

}  // namespace

std::string tokenizer_fingerprint(const BpeTokenizer& tokenizer) {
  const BpeModel& model = tokenizer.model();
  ContentHash hash;
  hash.add("tokens");
  for (std::size_t id = 0; id < model.tokens.size(); ++id) {
    if (!model.tokens[id].empty()) hash.add(static_cast<std::int64_t>(id)).add(model.tokens[id]);
  }
  hash.add("merges").add(static_cast<std::int64_t>(model.merges.size()));
  for (const BpeMerge& merge : model.merges)
    hash.add(std::int64_t{merge.left}).add(std::int64_t{merge.right}).add(std::int64_t{merge.result});
  std::vector<const AddedToken*> added;
  for (const AddedToken& token : model.added_tokens) added.push_back(&token);
  std::ranges::sort(added, {}, [](const AddedToken* token) { return token->id; });
  hash.add("added").add(static_cast<std::int64_t>(added.size()));
  for (const AddedToken* token : added) {
    hash.add(std::int64_t{token->id}).add(token->content);
    for (const bool flag : {token->special, token->normalized, token->single_word, token->lstrip, token->rstrip}) {
      hash.add(std::int64_t{flag});
    }
  }
  hash.add("model").add(std::int64_t{model.ignore_merges}).add(std::int64_t{model.byte_fallback});
  hash.add(std::int64_t{model.unknown.value_or(-1)}).add(std::int64_t{model.fuse_unknown});
  const StepHasher steps{hash};
  steps.all("normalizer", model.normalizer);
  steps.all("pre-tokenizer", model.pre_tokenizer);
  steps.all("decoder", model.decoder);
  for (const auto* side : {&model.prefix, &model.suffix}) {
    hash.add("template").add(static_cast<std::int64_t>(side->size()));
    for (const TokenId id : *side) hash.add(std::int64_t{id});
  }
  return std::string(kFingerprintVersion) + hash.hex();
}

std::string fingerprint_of_file(const std::filesystem::path& file) {
  try {
    return tokenizer_fingerprint(BpeTokenizer::load(file.string()));
  } catch (const DataError&) {
    return {};
  }
}

bool are_other_tokenizers(const std::string& a, const std::string& b) {
  return a != b && a.starts_with(kFingerprintVersion) && b.starts_with(kFingerprintVersion);
}

}  // namespace phalanx::data
