#include "phalanx/data/tokenizer/bpe_tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/tokenizer/bpe_encoder.h"
#include "phalanx/data/tokenizer/bpe_model.h"
#include "phalanx/data/tokenizer/bpe_trainer.h"

namespace phalanx::data {
namespace {

using nlohmann::json;

/// The results of the `tokenizers` package (scripts/make_tokenizer_golden.py).
const json& golden() {
  static const json file = json::parse(std::ifstream(PHALANX_DATA_TESTDATA "/tokenizer_golden.json"));
  return file;
}

BpeTokenizer golden_tokenizer(const char* which) {
  return BpeTokenizer::from_json(golden()[which]["tokenizer"].dump(), "golden");
}

std::vector<std::string> golden_documents() { return golden()["documents"].get<std::vector<std::string>>(); }

BpeTokenizer trained(std::int64_t vocab_size, const std::vector<std::string>& documents) {
  BpeTrainer trainer({.vocab_size = vocab_size});
  for (const std::string& text : documents) trainer.add(text);
  return trainer.train();
}

std::string random_bytes(std::mt19937& rng, std::size_t size) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(rng());
  return bytes;
}

// No caller has one; what reads its first byte would read beyond its end.
TEST(BpeEncoder, AnEmptyPieceHasNoIds) {
  const BpeEncoder encoder(golden_tokenizer("gpt2").model());
  BpeEncoder::Scratch scratch;
  std::vector<TokenId> ids(BpeEncoder::kSlack);
  EXPECT_EQ(encoder.encode({}, scratch, ids.data()), ids.data());
}

TEST(BpeTokenizerTest, IdsAreThoseOfTheTokenizersPackage) {
  const BpeTokenizer tokenizer = golden_tokenizer("gpt2");
  const auto samples = golden()["samples"].get<std::vector<std::string>>();
  const auto ids = golden()["gpt2"]["ids"].get<std::vector<std::vector<TokenId>>>();
  ASSERT_GT(samples.size(), 400u);
  for (int pass = 0; pass < 2; ++pass) {  // the second time from the cache
    for (std::size_t i = 0; i < samples.size(); ++i) {
      EXPECT_EQ(tokenizer.encode(samples[i]), ids[i]) << samples[i];
      EXPECT_EQ(tokenizer.decode(ids[i]), samples[i]);
    }
  }
}

TEST(BpeTokenizerTest, OtherSplitPatternsAndAddedTokensGiveThePackagesIds) {
  const BpeTokenizer tokenizer = golden_tokenizer("llama3");
  EXPECT_TRUE(tokenizer.model().ignore_merges);
  EXPECT_EQ(tokenizer.model().added_tokens.size(), 3u);
  const auto samples = golden()["llama3"]["samples"].get<std::vector<std::string>>();
  const auto ids = golden()["llama3"]["ids"].get<std::vector<std::vector<TokenId>>>();
  for (std::size_t i = 0; i < samples.size(); ++i) {
    EXPECT_EQ(tokenizer.encode(samples[i]), ids[i]) << samples[i];
    EXPECT_EQ(tokenizer.decode(ids[i]), samples[i]);
  }
}

TEST(BpeTokenizerTest, TrainingGivesThePackagesMergesAndIds) {
  const BpeTokenizer tokenizer = trained(1500, golden_documents());
  const json model = json::parse(tokenizer.to_json())["model"];
  const json& expected = golden()["gpt2"]["tokenizer"]["model"];
  ASSERT_EQ(model["merges"].size(), expected["merges"].size());
  for (std::size_t i = 0; i < model["merges"].size(); ++i) {
    const json& pair = expected["merges"][i];
    ASSERT_EQ(model["merges"][i].get<std::string>(), pair[0].get<std::string>() + " " + pair[1].get<std::string>())
        << i;
  }
  EXPECT_EQ(model["vocab"], expected["vocab"]);
  EXPECT_EQ(tokenizer.vocab_size(), 1500);
  EXPECT_EQ(tokenizer.end_of_text(), 0);
}

TEST(BpeTokenizerTest, TrainingDoesNotDependOnTheOrderOfDocuments) {
  auto documents = golden_documents();
  const std::string first = trained(900, documents).to_json();
  EXPECT_EQ(trained(900, documents).to_json(), first);
  std::reverse(documents.begin(), documents.end());
  EXPECT_EQ(trained(900, documents).to_json(), first);
}

TEST(BpeTokenizerTest, TrainingStopsWhereNoPairIsLeftAndReportsProgress) {
  BpeTrainer trainer({.vocab_size = 5000, .special_tokens = {}});
  trainer.add("aaaa bbbb aaaa bbbb");
  std::vector<std::int64_t> seen;
  const BpeTokenizer tokenizer = trainer.train([&](TrainingProgress p) {
    EXPECT_EQ(p.total, 5000);
    seen.push_back(p.done);
  });
  // aa, aaaa, bb, bbbb, " bbbb": nothing else occurs twice.
  EXPECT_EQ(tokenizer.vocab_size(), 256 + 5);
  EXPECT_EQ(tokenizer.end_of_text(), std::nullopt);
  EXPECT_EQ(seen.front(), 256);
  EXPECT_EQ(seen.back(), 261);
  EXPECT_EQ(tokenizer.encode("aaaa bbbb").size(), 2u);
  EXPECT_THROW(BpeTrainer({.vocab_size = 256}), ConfigError);  // no room for <|endoftext|>
  EXPECT_THROW(BpeTrainer({.vocab_size = 500, .special_tokens = {"<a>", "<a>"}}), ConfigError);
  EXPECT_EQ(BpeTrainer({.vocab_size = 257}).train().vocab_size(), 257);  // no text at all: the bytes
}

TEST(BpeTokenizerTest, AnyBytesMakeTheRoundTrip) {
  const BpeTokenizer tokenizers[] = {golden_tokenizer("gpt2"), golden_tokenizer("llama3"), trained(257, {})};
  std::vector<std::string> texts = {"",
                                    std::string(1, '\0'),
                                    "\xff",
                                    "\xc3",
                                    "abc\xe2\x82",
                                    "\xed\xa0\x80",
                                    "\xf4\x90\x80\x80 x",
                                    std::string(100000, 'a'),
                                    std::string(70000, ' ') + "\xff\n"};
  std::mt19937 rng(7);
  for (int i = 0; i < 200; ++i) texts.push_back(random_bytes(rng, rng() % 500));
  for (const std::string& document : golden_documents()) {
    texts.push_back(document);
    std::string damaged = document;  // source code with bytes that are no UTF-8
    for (std::size_t at = 50; at < damaged.size(); at += 97) damaged[at] = static_cast<char>(rng());
    texts.push_back(damaged);
  }
  for (const BpeTokenizer& tokenizer : tokenizers) {
    for (const std::string& text : texts) {
      const auto ids = tokenizer.encode(text);
      EXPECT_TRUE(tokenizer.decode(ids) == text) << text.substr(0, 50);
      EXPECT_TRUE(tokenizer.decode(tokenizer.encode(text, {.added_tokens = false})) == text);
      EXPECT_TRUE(tokenizer.decode(std::vector<std::int64_t>(ids.begin(), ids.end())) == text);
    }
  }
}

TEST(BpeTokenizerTest, LongAndShortPiecesAreMergedAlike) {
  // The same runs through both merge loops: 64 bytes is the border. Reference: rank by rank over the whole piece.
  const BpeTokenizer tokenizer = golden_tokenizer("gpt2");
  const auto reference = [&](const std::string& text) {
    std::vector<TokenId> ids;
    for (const char byte : text) ids.push_back(*tokenizer.id_of(std::string_view(&byte, 1)));
    for (const BpeMerge& merge : tokenizer.model().merges) {
      std::vector<TokenId> merged;
      for (std::size_t i = 0; i < ids.size(); ++i) {
        if (i + 1 < ids.size() && ids[i] == merge.left && ids[i + 1] == merge.right) {
          merged.push_back(merge.result);
          ++i;
        } else {
          merged.push_back(ids[i]);
        }
      }
      ids = merged;
    }
    return ids;
  };
  std::mt19937 rng(3);
  for (const std::size_t size : {1, 2, 3, 8, 9, 16, 17, 24, 25, 40, 63, 64, 65, 66, 100, 300}) {
    for (const char* letters : {"a", "ab", "thereinsaotd", "aaaaaaae"}) {
      std::string piece;
      while (piece.size() < size) piece += letters[rng() % std::string_view(letters).size()];
      EXPECT_EQ(tokenizer.encode(piece), reference(piece)) << piece;
    }
    EXPECT_EQ(tokenizer.encode(std::string(size, '-')), reference(std::string(size, '-')));
  }
}

TEST(BpeTokenizerTest, SavedFileLoadsToTheSameTokenizer) {
  const TempDirectory directory("tokenizer");
  for (const char* which : {"gpt2", "llama3"}) {
    const BpeTokenizer tokenizer = golden_tokenizer(which);
    const std::string path = (directory.path() / "tokenizer.json").string();
    tokenizer.save(path);
    const BpeTokenizer loaded = BpeTokenizer::load(directory.path().string());  // the directory will do
    EXPECT_EQ(loaded.to_json(), tokenizer.to_json());
    EXPECT_EQ(loaded.vocab_size(), tokenizer.vocab_size());
    EXPECT_EQ(loaded.model().merges, tokenizer.model().merges);
    EXPECT_EQ(loaded.model().pre_tokenizer, tokenizer.model().pre_tokenizer);
    for (const auto& text : golden_documents()) EXPECT_EQ(loaded.encode(text), tokenizer.encode(text));
  }
  // Components as the package writes them, so that it reads them too.
  const json ours = json::parse(golden_tokenizer("llama3").to_json());
  const json& theirs = golden()["llama3"]["tokenizer"];
  EXPECT_EQ(ours["pre_tokenizer"], theirs["pre_tokenizer"]);
  EXPECT_EQ(ours["added_tokens"], theirs["added_tokens"]);
  EXPECT_EQ(ours["model"]["vocab"], theirs["model"]["vocab"]);
}

TEST(BpeTokenizerTest, OldMergesAsOneStringAreRead) {
  json file = golden()["gpt2"]["tokenizer"];
  for (json& merge : file["model"]["merges"]) merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  const BpeTokenizer old = BpeTokenizer::from_json(file.dump());
  EXPECT_EQ(old.model().merges, golden_tokenizer("gpt2").model().merges);
}

TEST(BpeTokenizerTest, AddedTokensCanBeTakenAsText) {
  const BpeTokenizer tokenizer = golden_tokenizer("gpt2");
  EXPECT_EQ(tokenizer.encode("a<|endoftext|>").back(), 0);
  const auto plain = tokenizer.encode("a<|endoftext|>", {.added_tokens = false});
  EXPECT_EQ(std::count(plain.begin(), plain.end(), 0), 0);
  const auto ids = tokenizer.encode("x<|endoftext|>y");
  EXPECT_EQ(tokenizer.decode(ids, {.skip_special_tokens = true}), "xy");
  EXPECT_TRUE(tokenizer.is_special(0));
  EXPECT_FALSE(tokenizer.is_special(1));
  EXPECT_EQ(tokenizer.bytes_of(0), "<|endoftext|>");
  EXPECT_THROW(tokenizer.bytes_of(1500), DataError);
  EXPECT_EQ(tokenizer.decode(std::vector<TokenId>{-1}), "");  // as the package has it
}

TEST(BpeTokenizerTest, PrefixSpaceIsAddedToEveryStretchOfText) {
  json file = golden()["gpt2"]["tokenizer"];
  file["pre_tokenizer"]["add_prefix_space"] = true;
  const BpeTokenizer with = BpeTokenizer::from_json(file.dump());
  const BpeTokenizer without = golden_tokenizer("gpt2");
  EXPECT_EQ(with.encode("the fox<|endoftext|>the"), without.encode(" the fox<|endoftext|> the"));
  EXPECT_EQ(with.encode(" the"), without.encode(" the"));
  EXPECT_EQ(with.encode(""), std::vector<TokenId>{});
}

TEST(BpeTokenizerTest, TextCutAtASafePlaceGivesTheSameIds) {
  const BpeTokenizer tokenizer = golden_tokenizer("gpt2");
  int cuts = 0;
  for (const std::string& text : golden_documents()) {
    const auto whole = tokenizer.encode(text);
    for (std::size_t limit = 0; limit < text.size(); limit += 61) {
      const std::size_t cut = tokenizer.safe_cut(text, limit);
      ASSERT_LE(cut, limit);
      if (cut == 0) continue;
      auto parts = tokenizer.encode(std::string_view(text).substr(0, cut));
      tokenizer.encode_to(std::string_view(text).substr(cut), parts);
      ASSERT_EQ(parts, whole) << cut;
      ++cuts;
    }
  }
  EXPECT_GT(cuts, 300);
  EXPECT_EQ(tokenizer.safe_cut("one line", 5), 0u);
  EXPECT_EQ(tokenizer.safe_cut("all", 3), 3u);
  EXPECT_EQ(golden_tokenizer("llama3").safe_cut("ab\ncd\nef", 5), 0u);
}

TEST(BpeTokenizerTest, StreamingDecoderGivesWholeCharacters) {
  const BpeTokenizer tokenizer = trained(257, {});  // one token a byte: every character in pieces
  const std::string text = "aé漢😀\xff\xc3(\xe2\x82z\xf0\x9f\x98";
  StreamingDecoder decoder(tokenizer);
  std::vector<std::string> parts;
  for (const TokenId id : tokenizer.encode(text)) parts.push_back(decoder.add(id));
  EXPECT_EQ(parts, (std::vector<std::string>{"a", "", "é", "", "", "漢", "", "", "", "😀", "\xff", "", "\xc3(", "", "",
                                             "\xe2\x82z", "", "", ""}));
  EXPECT_EQ(decoder.finish(), "\xf0\x9f\x98");
  EXPECT_EQ(decoder.finish(), "");

  const BpeTokenizer real = golden_tokenizer("gpt2");
  for (const auto& sample : golden()["samples"]) {
    StreamingDecoder stream(real);
    std::string joined;
    for (const TokenId id : real.encode(sample.get<std::string>())) joined += stream.add(id);
    EXPECT_EQ(joined + stream.finish(), sample.get<std::string>());
  }
  StreamingDecoder quiet(real, {.skip_special_tokens = true});
  EXPECT_EQ(quiet.add(0), "");
  EXPECT_EQ(quiet.add(100000), "");  // no token has it
  EXPECT_FALSE(real.is_known(100000));
  EXPECT_FALSE(real.is_known(-1));
  EXPECT_TRUE(real.is_known(0));
  EXPECT_THROW(real.bytes_of(100000), DataError);
  EXPECT_EQ(real.decode(std::vector<std::int64_t>{real.encode("a")[0], std::int64_t{1} << 40, -1}), "a");
}

TEST(BpeTokenizerTest, ManyThreadsShareOneTokenizer) {
  const BpeTokenizer tokenizer = golden_tokenizer("gpt2");
  const auto documents = golden_documents();
  std::vector<std::vector<TokenId>> expected;
  expected.reserve(documents.size());
  for (const auto& text : documents) expected.push_back(tokenizer.encode(text));
  std::vector<int> wrong(4, 0);
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t i = 0; i < documents.size(); ++i) {
        const std::size_t which = (i + static_cast<std::size_t>(t)) % documents.size();
        wrong[t] += tokenizer.encode(documents[which]) != expected[which];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

struct MalformedCase {
  std::string name;
  std::function<void(json&)> damage;
  std::string message;
};

// What the `tokenizers` package (0.23) makes of them.
TEST(BpeTokenizerTest, AnAddedTokenHasTheVocabularysIdOrTheNextThatIsFree) {
  const json good = golden()["gpt2"]["tokenizer"];
  const auto size = static_cast<TokenId>(good["model"]["vocab"].size());
  const auto ids_with = [&](const std::vector<std::pair<std::string, TokenId>>& added, const json& vocab = {}) {
    json file = good;
    file["added_tokens"] = json::array();
    for (const auto& [content, id] : added) file["added_tokens"].push_back({{"content", content}, {"id", id}});
    if (vocab.is_object()) file["model"]["vocab"].update(vocab);
    const BpeTokenizer tokenizer = BpeTokenizer::from_json(file.dump(), "t.json");
    EXPECT_EQ(BpeTokenizer::from_json(tokenizer.to_json(), "again.json").vocab_size(), tokenizer.vocab_size());
    std::string text;
    for (const auto& [content, id] : added) text += content;
    return tokenizer.encode(text);
  };
  using Ids = std::vector<TokenId>;
  EXPECT_EQ(ids_with({{"<x>", size}}), Ids({size}));
  EXPECT_EQ(ids_with({{"<|endoftext|>", size}}), Ids({0}));
  EXPECT_EQ(ids_with({{"<|endoftext|>", size + 5}}), Ids({0}));
  EXPECT_EQ(ids_with({{"<x>", size + 5}}), Ids({size}));
  EXPECT_EQ(ids_with({{"<x>", size}, {"<y>", size + 5}}), Ids({size, size + 1}));
  EXPECT_EQ(ids_with({{"<x>", size + 1}, {"<y>", size}}), Ids({size, size + 1}));
  EXPECT_EQ(ids_with({{"<x>", size}, {"<|endoftext|>", 0}, {"<y>", size + 1}}), Ids({size, 0, size + 1}));
  EXPECT_EQ(ids_with({{"<x>", size}, {"<y>", size + 1}}, {{"zzzz", size + 3}}), Ids({size + 1, size + 2}));
  try {
    ids_with({{"<x>", size + 2}}, {{"zzzz", size + 1}});
    ADD_FAILURE();
  } catch (const DataError& error) {
    EXPECT_THAT(error.what(), HasSubstr("which is that of 'zzzz' in model.vocab: number model.vocab without gaps"));
  }
}

TEST(BpeTokenizerTest, MalformedFilesAreRefusedByFileAndKey) {
  const std::vector<MalformedCase> cases = {
      {"no model", [](json& f) { f.erase("model"); }, "model: missing"},
      {"model of another kind", [](json& f) { f["model"]["type"] = "Unigram"; },
       "model.type: 'Unigram' is not supported: supported are BPE"},
      {"model no object", [](json& f) { f["model"] = 3; }, "model: expected an object, found 3"},
      {"no vocab", [](json& f) { f["model"].erase("vocab"); }, "model.vocab: missing"},
      {"vocab no object", [](json& f) { f["model"]["vocab"] = json::array(); }, "model.vocab: expected an object"},
      {"empty vocab", [](json& f) { f["model"]["vocab"] = json::object(); }, "no token for byte 0x00"},
      {"no merges", [](json& f) { f["model"].erase("merges"); }, "model.merges: missing"},
      {"merge of one", [](json& f) { f["model"]["merges"][3] = "ab"; }, "model.merges[3]: expected two tokens"},
      {"merge of three", [](json& f) { f["model"]["merges"][3] = "a b c"; }, "model.merges[3]: expected two tokens"},
      {"merge a number", [](json& f) { f["model"]["merges"][3] = 1; }, "model.merges[3]: expected"},
      {"merge of numbers",
       [](json& f) {
         f["model"]["merges"][3] = {1, 2};
       },
       "model.merges[3]: expected"},
      {"merge unknown",
       [](json& f) {
         f["model"]["merges"][3] = {"zq", "x"};
       },
       "model.merges[3]: token 'zq' is not in model.vocab"},
      {"merge to nothing",
       [](json& f) {
         f["model"]["merges"][3] = {"z", "q"};
       },
       "model.merges[3]: token 'zq' is not in"},
      {"id no number", [](json& f) { f["model"]["vocab"]["a"] = "5"; },
       "model.vocab['a']: expected a token id, found \"5\""},
      {"id negative", [](json& f) { f["model"]["vocab"]["a"] = -5; }, "model.vocab['a']: id -5 is outside"},
      {"id fraction", [](json& f) { f["model"]["vocab"]["a"] = 1.5; },
       "model.vocab['a']: expected a token id, found 1.5"},
      {"id hostile", [](json& f) { f["model"]["vocab"]["a"] = 2000000000; },
       "model.vocab['a']: id 2000000000 is outside"},
      {"id beyond 64 bits", [](json& f) { f["model"]["vocab"]["a"] = ~0ull; }, "is outside 0 to"},
      {"id twice", [](json& f) { f["model"]["vocab"]["a"] = 7; }, "id 7 belongs to another token"},
      {"byte missing", [](json& f) { f["model"]["vocab"].erase("Ġ"); }, "token 'Ġ' is not in model.vocab"},
      {"no byte at all",
       [](json& f) {
         f["model"]["vocab"] = {{"ab", 1}};
         f["model"]["merges"] = json::array();
       },
       "model.vocab: no token for any byte"},
      {"unknown token not there, and needed",
       [](json& f) {
         f["model"]["vocab"].erase("ĉ");
         f["model"]["merges"] = json::array();
         f["model"]["unk_token"] = "<none>";
       },
       "model.unk_token: '<none>' is not in model.vocab, which has no token for 1 bytes such as 0x09"},
      {"empty token", [](json& f) { f["model"]["vocab"][""] = 1600; }, "holds an empty token"},
      {"dropout", [](json& f) { f["model"]["dropout"] = 0.1; }, "model.dropout: '0.1' is not supported"},
      {"byte fallback", [](json& f) { f["model"]["byte_fallback"] = true; }, "model.byte_fallback"},
      {"suffix", [](json& f) { f["model"]["end_of_word_suffix"] = "</w>"; }, "model.end_of_word_suffix"},
      {"flag no flag", [](json& f) { f["model"]["ignore_merges"] = 1; }, "model.ignore_merges: expected true or false"},
      {"version", [](json& f) { f["version"] = "2.0"; }, "version: '\"2.0\"' is not supported"},
      {"normalizer",
       [](json& f) {
         f["normalizer"] = {{"type", "BertNormalizer"}};
       },
       "normalizer: 'BertNormalizer' is not supported: supported are NFC, NFD"},
      {"post-processor",
       [](json& f) {
         f["post_processor"] = {{"type", "BertProcessing"}};
       },
       "post_processor: 'BertProcessing' is not supported: supported are TemplateProcessing"},
      {"no decoder", [](json& f) { f["decoder"] = nullptr; },
       "decoder: 'null' is not supported: supported are ByteLevel"},
      {"decoder",
       [](json& f) {
         f["decoder"] = {{"type", "WordPiece"}};
       },
       "decoder: 'WordPiece'"},
      {"decoder no object", [](json& f) { f["decoder"] = "ByteLevel"; }, "decoder: expected an object"},
      {"no pre-tokenizer", [](json& f) { f.erase("pre_tokenizer"); },
       "decoder: is ByteLevel, but pre_tokenizer does not end"},
      {"pre-tokenizer",
       [](json& f) {
         f["pre_tokenizer"] = {{"type", "UnicodeScripts"}};
       },
       "pre_tokenizer: 'UnicodeScripts' is not supported: supported are ByteLevel, Metaspace"},
      {"empty sequence",
       [](json& f) {
         f["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", json::array()}};
       },
       "decoder: is ByteLevel, but pre_tokenizer does not end"},
      {"sequence with more",
       [](json& f) {
         f["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {f["pre_tokenizer"], {{"type", "Digits"}}}}};
       },
       "pre_tokenizer.pretokenizers[1]: 'Digits' after ByteLevel is not supported"},
      {"bad regex",
       [](json& f) {
         const json split = {
             {"type", "Split"}, {"pattern", {{"Regex", "a(b"}}}, {"behavior", "Isolated"}, {"invert", false}};
         f["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {split, f["pre_tokenizer"]}}};
       },
       "pre_tokenizer.pretokenizers[0].pattern.Regex: the split pattern 'a(b' is not valid at character 3"},
      {"split to nothing known",
       [](json& f) {
         const json split = {{"type", "Split"}, {"pattern", {{"Regex", "a"}}}, {"behavior", "Kept"}, {"invert", false}};
         f["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {split, f["pre_tokenizer"]}}};
       },
       "behavior: 'Kept' is not supported: supported are Isolated, Removed"},
      {"added no array", [](json& f) { f["added_tokens"] = 1; }, "added_tokens: expected an array"},
      {"added no object", [](json& f) { f["added_tokens"][0] = 1; }, "added_tokens[0]: expected an object"},
      {"added without id", [](json& f) { f["added_tokens"][0].erase("id"); }, "added_tokens[0].id: missing"},
      {"added with a token's id", [](json& f) { f["added_tokens"][0]["id"] = 5; },
       "added_tokens[0].id: id 5 of '<|endoftext|>' is that of"},
      {"added hostile id", [](json& f) { f["added_tokens"][0]["id"] = 1 << 30; }, "added_tokens[0].id: id 1073741824"},
      {"added empty", [](json& f) { f["added_tokens"][0]["content"] = ""; }, "added_tokens[0].content: expected text"},
      {"added twice", [](json& f) { f["added_tokens"].push_back(f["added_tokens"][0]); },
       "'<|endoftext|>' appears twice"},
      {"added lstrip", [](json& f) { f["added_tokens"][0]["lstrip"] = "yes"; },
       "added_tokens[0].lstrip: expected true or false, found \"yes\""},
      {"an array", [](json& f) { f = json::array(); }, "expected a JSON object, found array"},
  };
  const auto error_of = [](const std::string& text) {
    return error_text<DataError>([&] { BpeTokenizer::from_json(text, "some/tokenizer.json"); });
  };
  for (const MalformedCase& test : cases) {
    json file = golden()["gpt2"]["tokenizer"];
    test.damage(file);
    EXPECT_THAT(error_of(file.dump()), AllOf(HasSubstr("some/tokenizer.json: "), HasSubstr(test.message))) << test.name;
  }
  const std::string good = golden()["gpt2"]["tokenizer"].dump();
  EXPECT_EQ(error_of(good), "");
  for (const std::size_t size : {0, 1, 100, 5000}) {
    EXPECT_THAT(error_of(good.substr(0, size)), HasSubstr("some/tokenizer.json: not valid JSON")) << size;
  }
  const auto nested = [](const std::string& open, const std::string& close) {
    std::string text;
    for (int i = 0; i < 100'000; ++i) text += open;
    for (int i = 0; i < 100'000; ++i) text += close;
    return text;
  };
  for (const std::string& deep :
       {nested("[", "]"), "{\"model\":{\"dropout\":" + nested("[", "]") + "}}",
        "{\"normalizer\":" + nested("{\"type\":\"Sequence\",\"normalizers\":[", "]}") + "}"}) {
    EXPECT_THAT(error_of(deep), HasSubstr("some/tokenizer.json: its JSON nests deeper than 100 levels"));
  }
  EXPECT_THAT(error_of("{\"model\": \"\xff\"}"), HasSubstr("not valid JSON"));
  EXPECT_THROW(BpeTokenizer::load("/nowhere/tokenizer.json"), FileError);

  // Bytes changed at random: loaded or refused, never a crash.
  std::mt19937 rng(1);
  int refused = 0;
  for (int i = 0; i < 60; ++i) {
    std::string damaged = good;
    for (int n = 0; n < 3; ++n) damaged[rng() % damaged.size()] = static_cast<char>(rng() % 128);
    refused += error_of(damaged) != "";
  }
  EXPECT_GT(refused, 10);
}

}  // namespace
}  // namespace phalanx::data
