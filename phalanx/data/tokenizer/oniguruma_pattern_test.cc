#include "phalanx/data/tokenizer/oniguruma_pattern.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/tokenizer/pre_tokenizer.h"

namespace phalanx::data {
namespace {

// Pattern, text, and the pieces that the `tokenizers` package (0.23) cuts it into by Split(Regex(pattern), "isolated").
constexpr const char* kPieces = R"json([
  ["a{2,3}+", "aaaaaaab", ["aaaaaa", "ab"]],
  ["a{2,3}+a", "aaaaaab", ["aaaaaa", "b"]],
  ["a{2,3}+ab", "aaaaab", ["aaaaab"]],
  ["a{2}?", "aaaaa", ["aa", "aa", "a"]],
  ["ba{2}?", "baabab", ["baa", "b", "a", "b"]],
  ["a{2,3}?", "aaaaab", ["aa", "aa", "ab"]],
  ["a{,2}", "aaab", ["aa", "a", "b"]],
  ["a{,}", "aa{,}b", ["a", "a{,}", "b"]],
  ["a{ 1}", "a{ 1}aa", ["a{ 1}", "aa"]],
  ["a{2}{2}", "aaaaaaab", ["aaaa", "aaab"]],
  ["a{2}{3}?", "aaaaaaaaab", ["aaaaaa", "a", "a", "a", "b"]],
  ["(?:ab){1,2}+", "abababab", ["abababab"]],
  ["a+*", "aaab", ["aaa", "b"]],
  ["a**b", "aaab", ["aaab"]],
  ["a{1,2}++", "aaab", ["aaa", "b"]],
  ["[ab]{1,2}+c", "ababc", ["ababc"]],
  ["\\d{1,3}+", "1234567", ["1234567"]],
  ["\\p{N}{1,3}+(?=\\p{L})", "1234a", ["1234", "a"]],
  ["a(?i)b|c", "aB aC C", ["aB", " ", "aC", " C"]],
  ["x(?:a(?i)b|c)d", "xaBd xaCD xcd", ["xaBd", " xaCD xcd"]],
  ["(?m:a.b)", "a\nb", ["a\nb"]],
  ["(?m)a.b", "a\nb a.b", ["a\nb", " ", "a.b"]],
  ["\\p{Han}+", "\u6f22\u5b57\u30fc\u3005\u3001a", ["\u6f22\u5b57", "\u30fc", "\u3005", "\u3001a"]],
  ["\\p{Hiragana}+", "\u3072\u3089\u30fc\u309ba", ["\u3072\u3089", "\u30fc\u309ba"]],
  ["\\p{Katakana}+", "\u30ab\u30fc\uff76\uff9e", ["\u30ab", "\u30fc", "\uff76", "\uff9e"]],
  ["\\p{Latin}+", "a\u00e9\u00aa\uff57\u00ba1", ["a\u00e9\u00aa\uff57\u00ba", "1"]],
  ["[[:alpha:]]+", "a\u00e9\u2167\u24b61", ["a\u00e9\u2167\u24b6", "1"]],
  ["\\v+", "a\u000b\n\u2028", ["a", "\u000b", "\n\u2028"]],
  ["\\u3042+", "\u3042\u3042b", ["\u3042\u3042", "b"]],
  ["\\x41+", "AAb", ["AA", "b"]],
  ["[]a]+", "a]b", ["a]", "b"]],
  ["(?<x>a)(b)\\k<x>", "aba", ["aba"]],
  ["\\p{^L}+", "ab12", ["ab", "12"]],
  ["\\p{Greek}", "\u03b1\u00b7\u0375", ["\u03b1", "\u00b7", "\u0375"]],
  ["\\e", "\u001b", ["\u001b"]],
  ["(a)|b\\1", "ab", ["a", "b"]],
  ["[\\w-]+", "a-b", ["a-b"]],
  ["\\Aab", "abab", ["ab", "ab"]],
  ["^ab", "ab\nab", ["ab", "\n", "ab"]],
  ["ab\\Z", "ab\n", ["ab", "\n"]],
  ["a$", "a\nba", ["a", "\nb", "a"]],
  ["\\p{Alpha}+", "a\u24b61", ["a\u24b6", "1"]],
  ["\\p{Emoji}+", "\ud83d\ude001", ["\ud83d\ude001"]],
  ["\\p{L}\\p{M}*+", "a\u0301b", ["a\u0301", "b"]],
  ["[^\\S\\r\\n]+", " \t\n", [" \t", "\n"]],
  ["\\x{1F600}", "\ud83d\ude00", ["\ud83d\ude00"]],
  ["[\\x{4e00}-\\x{9fff}]", "\u6f22", ["\u6f22"]],
  ["(?>a+)b", "aab", ["aab"]],
  ["(?<!a)b", "ab b", ["ab ", "b"]],
  ["a??b", "ab", ["ab"]],
  ["a?+a", "aa", ["aa"]],
  ["(?i:'s|'t)", "'\u017f'S", ["'\u017f", "'S"]],
  ["{", "a{b", ["a", "{", "b"]],
  ["a{", "a{b", ["a{", "b"]],
  ["x}", "x}", ["x}"]],
  ["\\{2\\}", "{2}", ["{2}"]],
  ["\\d{1,3}+(?=[A-Z])", "12345A6", ["12345", "A6"]],
  ["(?:\\r?\\n){2,4}+x", "\n\n\n\n\n\n\nx", ["\n\n\n\n\n\n\nx"]],
  ["[^\\s]{2,3}+\\s", "abcdefg h", ["abcdefg ", "h"]],
  ["\\p{L}{2}?\\d", "ab1 1", ["ab1", " ", "1"]],
  ["\u6f22{2,3}+", "\u6f22\u6f22\u6f22\u6f22\u6f22\u6f22\u6f22", ["\u6f22\u6f22\u6f22\u6f22\u6f22\u6f22", "\u6f22"]],
  ["\\u6f22{,2}\u5b57", "\u6f22\u6f22\u6f22\u5b57", ["\u6f22", "\u6f22\u6f22\u5b57"]],
  ["(?i)a|b", "AB", ["A", "B"]],
  ["(a(?i)b|c)c", "aBC ac cC", ["aBC ac cC"]],
  ["[[:upper:][:digit:]_]+", "AB_1a", ["AB_1", "a"]],
  ["(?#note)a{2,}+b", "aaaab", ["aaaab"]],
  ["a{0}b", "ab", ["a", "b"]],
  ["(?=a{2,3}+b)a", "aaab", ["a", "a", "ab"]],
  ["[\\w]+", "x\u00bd\u00b2a", ["x", "\u00bd\u00b2", "a"]],
  ["\\w+", "x\u00bd\u00b2a", ["x\u00bd\u00b2a"]],
  ["[^\\w]+", "a\u00bd\u00b2!", ["a", "\u00bd\u00b2!"]],
  ["[\\w\\p{P}]+", "a\u00bd!\u00be", ["a", "\u00bd", "!", "\u00be"]],
  ["[[:word:]]+", "a\u00b2b", ["a", "\u00b2", "b"]],
  ["[^[:word:]]+", "a\u00b2b", ["a", "\u00b2", "b"]],
  ["[[:alpha:]]+", "a\u0363b", ["a\u0363b"]],
  ["[[:lower:]]+", "a\u10fcB", ["a\u10fc", "B"]],
  ["\\P{Alphabetic}+", "a\u0363!b", ["a\u0363", "!", "b"]],
  ["(?i)\\p{Lu}+", "aBC", ["a", "BC"]],
  ["(?i)\\p{Ll}+", "aBC", ["a", "BC"]],
  ["(?i)(?-i:[[:upper:]]+)", "aBC", ["a", "BC"]],
  ["(?i)[^\\p{L}]+", "a1\u0345b", ["a", "1", "\u0345b"]],
  ["(?i)[^\\s\\p{L}\\p{N}]+", "a!\u0345 b", ["a", "!", "\u0345 b"]],
  ["(?i)[^\\w]+", "a\u00bd!", ["a", "\u00bd!"]],
  ["(?i)[st]+", "\u017ftS\u00df", ["\u017ftS", "\u00df"]],
  ["(?i)s(s)", "-\u00df-ss", ["-\u00df-", "ss"]],
  ["(?i)s+s", "-\u00df-sSs", ["-\u00df-", "sSs"]],
  ["(?i:s)(?i:s)", "-\u00df-Ss", ["-\u00df-", "Ss"]],
  ["(?i)s{2}", "-\u00df-sS", ["-\u00df-", "sS"]],
  ["(?i)f[iI]", "-\ufb01-FI", ["-\ufb01-", "FI"]],
  ["(?-i:ss)", "-\u00df-ss", ["-\u00df-", "ss"]],
  ["(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'\u017f'\u00dfs'RE'\u017ft'\ufb06", ["'\u017f", "'\u00dfs", "'RE", "'\u017f", "t'\ufb06"]],
  ["'(?i:[sdmt]|ll|ve|re)", "'\u017f'\u00df'LL'st'\ufb06", ["'\u017f", "'\u00df", "'LL", "'s", "t'\ufb06"]],
  ["(?i)k", "K\u212ak", ["K", "\u212a", "k"]],
  ["\\p{XID_Continue}+", "a\u200db-\ud83d\udc69\u200d\ud83d\ude92", ["a\u200db", "-\ud83d\udc69", "\u200d", "\ud83d\ude92"]],
  ["\\p{ID_Continue}+", "a\u30fb\uff65-", ["a\u30fb\uff65", "-"]]
])json";

TEST(OnigurumaPatternTest, FindsWhatThePackageFinds) {
  for (const auto& one : nlohmann::json::parse(kPieces)) {
    const auto pattern = one[0].get<std::string>(), text = one[1].get<std::string>();
    const PreTokenizer splitter({SplitStep{{.text = pattern, .is_regex = true}, SplitBehavior::isolated, false}});
    PreTokenizer::Scratch scratch = splitter.make_scratch();
    std::vector<std::string> pieces;
    splitter.split({text}, scratch, [&](std::string_view piece) { pieces.emplace_back(piece); });
    EXPECT_EQ(pieces, one[2].get<std::vector<std::string>>())
        << pattern << " of " << text << " as " << pcre_of_oniguruma(pattern);
  }
}

TEST(OnigurumaPatternTest, WhatHasAnotherMeaningInPcreIsRefusedByName) {
  const std::vector<std::pair<std::string, std::string>> refused = {{"a{3,2}", "{3,2}"},
                                                                    {"x[[:punct:]]", "[:punct:]"},
                                                                    {"[a&&b]", "&& in a set"},
                                                                    {"[a[bc]]", "[ in a set"},
                                                                    {R"(\N)", R"(\N)"},
                                                                    {R"(\O)", R"(\O)"},
                                                                    {R"(\Qa\E)", R"(\Q)"},
                                                                    {R"(\R)", R"(\R)"},
                                                                    {R"(\h)", R"(\h)"},
                                                                    {R"(\pL)", R"(\p)"},
                                                                    {R"(\xe9)", R"(\xe9)"},
                                                                    {R"(a\Kb)", R"(\K)"},
                                                                    {R"(\bx)", R"(\b)"},
                                                                    {"(?x)a b", "(?x"},
                                                                    {"(?s).", "(?s"},
                                                                    {"(*FAIL)", "(*"},
                                                                    {"(?|a|b)", "(?|"},
                                                                    {R"([\W])", R"(\W)"},
                                                                    {"a{100000}", "{100000}"},
                                                                    {R"(\u12)", R"(\u12)"},
                                                                    {"(?(1)a|b)", "(?("},
                                                                    {"(?P<x>a)", "(?P"},
                                                                    {"(?=a)*b", "*"},
                                                                    {"(?!a)?", "?"},
                                                                    {"(?<=a){2}b", "{2}"},
                                                                    {"(?<!a)+?b", "+"},
                                                                    {"^*a", "*"},
                                                                    {"a$+", "+"},
                                                                    {R"(\A?b)", "?"},
                                                                    {"(?i)(?=a){,3}", "{0,3}"}};
  for (const auto& [pattern, part] : refused) {
    try {
      pcre_of_oniguruma(pattern);
      ADD_FAILURE() << pattern;
    } catch (const DataError& error) {
      EXPECT_THAT(error.what(), HasSubstr("the split pattern '" + pattern + "' holds '" + part + "', which is not"));
    }
  }
}

// Found by the package, where it has them, in other places than by PCRE2.
TEST(OnigurumaPatternTest, WhatIgnoresCaseInAnotherWayOrIsPcresOwnIsRefusedWithAdvice) {
  const std::vector<std::pair<std::string, std::string>> refused = {
      {"(?i)ss", "ss"},
      {"(?i)a(?:fi)", "fi"},
      {"(?i)s(?:s)t", "ss"},
      {"(?i)s{1}s", "ss"},
      {"(?i)s(?#x)s", "ss"},
      {"(?i)(?:ſt)+", "st"},
      {R"((?i)s\x73)", "ss"},
      {"(?i:a|ﬁ)", "ﬁ"},
      {"(?i)ß", "ß"},
      {"(?i)ŉ", "ŉ"},
      {"(?i)[aß]", "ß in a set under (?i)"},
      {"(?i)[Ü-ÿ]", "ß in a set under (?i)"},
      {R"((?i)[\p{Lu}])", R"(\p{Lu} in a set under (?i))"},
      {R"((?i)[^\p{Ll}])", R"(\p{Ll} in a set under (?i))"},
      {"(?i)[[:upper:]]+", "[:upper:] in a set under (?i)"},
      {"(?i:[^[:lower:]])", "[:lower:] in a set under (?i)"},
      {R"((?i)[\w]x)", R"(\w in a set under (?i))"},
      {R"((?i)[\p{L}])", R"(\p{L} in a set under (?i))"},
      {R"((?i)[\S])", R"(\S in a set under (?i))"},
      {R"((?i)(a)\1)", R"(\1 under (?i))"},
      {R"(\p{Script=Han})", R"(\p{Script=Han})"},
      {R"(\p{scx=Han})", R"(\p{scx=Han})"},
      {R"(\p{sc:Han})", R"(\p{sc:Han})"},
      {R"(\p{L&})", R"(\p{L&})"},
      {R"(\p{Xan})", R"(\p{Xan})"},
      {R"(\p{Xwd})", R"(\p{Xwd})"},
      {R"(\p{Xsp})", R"(\p{Xsp})"},
      {R"(\p{^Xps})", R"(\p{^Xps})"},
      {R"(\P{X_an})", R"(\P{X_an})"},
      {R"(\p{Bidi_Class_AL})", R"(\p{Bidi_Class_AL})"},
      {R"(\p{bidi_al})", R"(\p{bidi_al})"},
      {R"(\p{Diacritic})", R"(\p{Diacritic})"},
      {R"(\p{Nonsense})", R"(\p{Nonsense})"},
      {R"([\P{Alphabetic}])", R"(\P{Alphabetic} in a set)"}};
  for (const auto& [pattern, part] : refused) {
    try {
      pcre_of_oniguruma(pattern);
      ADD_FAILURE() << pattern;
    } catch (const DataError& error) {
      EXPECT_THAT(error.what(),
                  HasSubstr("the split pattern '" + pattern + "' holds '" + part + "', which is not supported: "));
    }
  }
}

}  // namespace
}  // namespace phalanx::data
