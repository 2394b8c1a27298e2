#include "phalanx/data/jinja/template.h"

#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/jinja/json_value.h"
#include "phalanx/data/jinja/python_text.h"
#include "phalanx/data/jinja/testing/fixed_clock.h"

namespace phalanx::jinja {
namespace {

std::string rendered(const std::string& source, const Context& context = {}, const Limits& limits = {}) {
  return Template::parse(source, "test.jinja").render(context, {.limits = limits, .clock = fixed_clock}).text;
}

std::string refusal(const std::string& source, const Limits& limits = {}) {
  return error_text<DataError>([&] { rendered(source, {}, limits); });
}

Context context_of(const Value& dict) {
  Context context;
  for (const auto& [key, value] : dict.dict().entries()) context.emplace_back(key.text(), value);
  return context;
}

/// Positions in bytes of positions in characters.
std::vector<TextSpan> in_bytes(const std::string& text, const nlohmann::json& spans) {
  std::vector<TextSpan> made;
  const auto characters = characters_of(text);
  const auto position = [&](std::size_t count) {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < count; ++i) bytes += characters[i].size();
    return bytes;
  };
  for (const auto& span : spans) made.push_back({position(span[0]), position(span[1])});
  return made;
}

TEST(Template, RendersAsTransformersDoes) {
  const std::string file = PHALANX_DATA_TESTDATA "/golden.json";
  const std::string text = read_file(file);
  const Context context = context_of(*read_json(text, file).dict().named("context"));
  int cases = 0;
  const nlohmann::json parsed = nlohmann::json::parse(text);
  for (const auto& golden : parsed["cases"]) {
    const std::string source = golden["template"];
    SCOPED_TRACE(source);
    ++cases;
    if (golden.contains("error")) {
      EXPECT_THROW(rendered(source, context), DataError);
      continue;
    }
    const Rendered found = Template::parse(source, "golden").render(context, {.clock = fixed_clock});
    EXPECT_EQ(found.text, golden["text"].get<std::string>());
    if (golden.contains("generated")) {
      auto spans = in_bytes(found.text, golden["generated"]);
      EXPECT_THAT(found.generated, ::testing::UnorderedElementsAreArray(spans));
    }
  }
  EXPECT_GT(cases, 200);
}

TEST(Template, ErrorsNameTheTemplateTheLineAndTheReason) {
  EXPECT_EQ(refusal("a\n{{ 1 +\n }}"),
            "test.jinja, line 3: expected an expression, found the end of the expression, }}");
  EXPECT_EQ(refusal("\n\n{{ raise_exception('no tools') }}"),
            "test.jinja, line 3: the template refuses this: no tools");
  EXPECT_EQ(refusal("{{ x.y }}"), "test.jinja, line 1: 'x' is undefined");
  EXPECT_EQ(refusal("{{ 'a' | uper }}"), "test.jinja, line 1: no filter is named 'uper' (did you mean 'upper'?)");
  EXPECT_EQ(refusal("{{ 1 is nmber }}"), "test.jinja, line 1: no test is named 'nmber' (did you mean 'number'?)");
  EXPECT_EQ(refusal("{% include 'x' %}"), "test.jinja, line 1: {% include %} is no statement of chat templates");
  EXPECT_EQ(refusal("\n{% for x in y %}"),
            "test.jinja, line 2: the block of line 2 has no end: expected {% else %} or {% endfor %}");
  EXPECT_EQ(refusal("{{ 'a'.encode() }}"), "test.jinja, line 1: str.encode(): this method is not supported");
  EXPECT_EQ(refusal("{{ 0x10 }}"), "test.jinja, line 1: a number of another base than ten is not supported");
  EXPECT_EQ(refusal("{{ 99999999999999999999 }}"),
            "test.jinja, line 1: the number 99999999999999999999 is out of range");
  EXPECT_EQ(refusal("{{ 9223372036854775807 + 1 }}"),
            "test.jinja, line 1: 9223372036854775807 + 1 is outside of 64 bits");
  EXPECT_EQ(refusal("\xFF"), "test.jinja: it is not valid UTF-8");
  EXPECT_EQ(refusal("{{ strftime_now }}"), "test.jinja, line 1: a value of type 'function' has no text of its own");
}

// The expected texts are those of jinja2 3.1.6; what does not fit 64 bits is an error here.
TEST(Template, NumbersAndWordsInTextsAreReadAsJinjaReadsThem) {
  EXPECT_EQ(rendered("{{ '1_000' | int }} {{ '0xff' | int(base=16) }} {{ '0b1_0' | int(base=2) }} {{ '1__0' | int }} "
                     "{{ '_1' | int }} {{ '1_0.5' | float }} {{ '1e_5' | float }}"),
            "1000 255 2 0 0 10.5 0.0");
  EXPECT_EQ(rendered("{{ \"it's a-b\" | wordcount }} {{ 'é_1 -- x' | wordcount }}"), "4 2");
  EXPECT_EQ(rendered("{{ \"it's x2y\" | title }} {{ 'a-b (cD [eF' | title }}"), "It's X2y A-B (Cd [Ef");
  EXPECT_THAT(refusal("{{ '99999999999999999999' | int }}"), HasSubstr("does not fit the 64 bits"));
  EXPECT_THAT(refusal("{{ 1e30 | int }}"), HasSubstr("does not fit the 64 bits"));
}

TEST(Template, TimeMemoryAndOutputAreBounded) {
  EXPECT_THAT(refusal("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"),
              HasSubstr("bytes of values"));
  EXPECT_THAT(refusal("{% for a in range(1000) %}{{ a }}{% endfor %}", {.steps = 1000}),
              HasSubstr("more than 1000 steps: a loop that is too long?"));
  EXPECT_THAT(refusal("{{ 'x' * 10000000000 }}"), HasSubstr("bytes of values"));
  EXPECT_THAT(
      refusal("{% set ns = namespace(x='aaaaaaaa') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"),
      HasSubstr("bytes of values"));
  EXPECT_THAT(refusal("{% set ns = namespace(x='aaaaaaaa') %}{% for a in range(99) %}{% set ns.x = ns.x | replace('a', "
                      "ns.x) %}{% endfor %}"),
              HasSubstr("bytes of values"));
  EXPECT_THAT(refusal("{% for a in range(99) %}{{ 'x' * 1000 }}{% endfor %}", {.output_bytes = 5000}),
              HasSubstr("writes more than 5000 bytes"));
  EXPECT_THAT(refusal("{{ '%1000000000d' % 1 }}"), HasSubstr("a width of more than 1000"));
  EXPECT_THAT(refusal("{{ 'a'.center(100000000000) }}"), HasSubstr("bytes of values"));
  EXPECT_THAT(refusal("{{ [1] | tojson(indent=100000000) }}"), HasSubstr("an indent of more than"));
  EXPECT_THAT(refusal("{{ [1] | batch(100000000000, 0) | list }}"), HasSubstr("bytes of values"));
  EXPECT_THAT(refusal("{{ range(100001) }}"), HasSubstr("Range too big"));
}

TEST(Template, DepthIsBounded) {
  EXPECT_THAT(refusal("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
              HasSubstr("a macro that calls itself without end?"));
  const auto nested = [](const char* open, const char* inner, const char* close, int count) {
    std::string text, end;
    for (int i = 0; i < count; ++i) text += open, end += close;
    return text + inner + end;
  };
  for (const int count : {101, 100000}) {
    EXPECT_THAT(refusal("{{ " + nested("(", "1", ")", count) + " }}"), HasSubstr("nests deeper than 100 levels"));
    EXPECT_THAT(refusal("{{ " + nested("[", "1", "]", count) + " }}"), HasSubstr("nests deeper than 100 levels"));
    EXPECT_THAT(refusal("{{ " + nested("not ", "1", "", count) + " }}"), HasSubstr("nests deeper than 100 levels"));
    EXPECT_THAT(refusal("{{ " + nested("-", "1", "", count) + " }}"), HasSubstr("nests deeper than 100 levels"));
    EXPECT_THAT(refusal(nested("{% if 1 %}", "1", "{% endif %}", count)), HasSubstr("nests deeper than 100 levels"));
    EXPECT_THAT(refusal("{{ x" + nested(".a", "", "", count) + " }}"), HasSubstr("a chain of more than 30"));
  }
  EXPECT_EQ(rendered("{{ 1" + nested(" + 1", "", "", 5000) + " }}"), "5001");  // a row is not deep
}

TEST(Template, ValuesThatHoldEachOtherAreFreedAndBounded) {
  EXPECT_EQ(rendered("{% set ns = namespace() %}{% set ns.a = [ns] %}{% set ns.m = {'x': ns} %}done"), "done");
  EXPECT_THAT(refusal("{% set ns = namespace(x=1) %}{% for a in range(1000) %}{% set ns.x = [ns.x] %}{% endfor %}"),
              HasSubstr("a value nests deeper than 200 levels"));
  // Every value is twice in the next one: it would print as 2^60 numbers.
  EXPECT_THAT(
      refusal(
          "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}"),
      HasSubstr("larger than 256 MiB"));
  EXPECT_EQ(rendered("{% macro f() %}{% endmacro %}{% set ns = namespace(f=f) %}{% for x in range(9) %}{% macro g() "
                     "%}{{ x }}{% endmacro %}{% set ns.f = g %}{% endfor %}{{ ns.f() }}"),
            "8");
}

TEST(Template, SearchingIsLinear) {
  const auto start = std::chrono::steady_clock::now();
  const Context context = {{"a", Value(std::string(1 << 20, 'a'))}, {"b", Value(std::string(1 << 19, 'a') + "b")}};
  EXPECT_EQ(rendered("{{ b in a }}{{ a.split(b) | length }}{{ a.rsplit(b) | length }}{{ a.replace(b, '') | length }}{{ "
                     "a.strip(b) }}",
                     context),
            "False111048576");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(Template, ContextHidesTheGlobalsAndNothingElseIsVisible) {
  EXPECT_EQ(rendered("{{ range }}", {{"range", "mine"}}), "mine");
  EXPECT_EQ(rendered("{{ environ is defined }}{{ self is defined }}{{ ''.__class__ is defined }}"), "FalseFalseFalse");
}

TEST(Template, BracesThatAreNoTagsAreText) {
  EXPECT_EQ(rendered("{ {{ 1 }} }"), "{ 1 }");
  EXPECT_EQ(rendered("{"), "{");
  EXPECT_EQ(rendered("%{"), "%{");
  EXPECT_EQ(rendered("{{ 1 }}{"), "1{");
  EXPECT_EQ(rendered("#a"), "#a");
}

TEST(Template, SaysWhereMarksAreLost) {
  const auto marks = [](const std::string& source) { return Template::parse(source, "test").render({}); };
  EXPECT_EQ(marks("ab{% generation %}cd{% endgeneration %}").generated, (std::vector<TextSpan>{{2, 4}}));
  EXPECT_EQ(marks("a{% generation %}b{% generation %}c{% endgeneration %}{% endgeneration %}").generated,
            (std::vector<TextSpan>{{2, 3}, {1, 3}}));
  EXPECT_FALSE(marks("ab{% generation %}cd{% endgeneration %}").lost_marks);
  EXPECT_TRUE(marks("{% macro f() %}{% generation %}x{% endgeneration %}{% endmacro %}{{ f() }}").lost_marks);
  EXPECT_TRUE(marks("{% set x %}{% generation %}x{% endgeneration %}{% endset %}").lost_marks);
  EXPECT_TRUE(Template::parse("{% generation %}{% endgeneration %}", "test").has_generation_marks());
  EXPECT_FALSE(Template::parse("{{ add_generation_prompt }}", "test").has_generation_marks());
}

TEST(Template, TheClockIsTheLocalTimeUnlessGiven) {
  EXPECT_EQ(rendered("{{ strftime_now('%d %b %Y') }}"), "02 Jan 2026");
  const std::string now = Template::parse("{{ strftime_now('%Y') }}", "test").render({}).text;
  EXPECT_GE(std::stoi(now), 2025);
  EXPECT_THAT(refusal("{{ strftime_now('%c' * 500) }}"), HasSubstr("longer than 1024 bytes"));
}

TEST(ReadJson, KeepsTheOrderOfKeysAndWholeNumbers) {
  const Value value = read_json(R"({"z": 1, "a": [1.0, -2, null, true, {"b": "\u00e9"}], "m": {}})", "test");
  EXPECT_EQ(to_json(value, {}), R"({"z": 1, "a": [1.0, -2, null, true, {"b": "é"}], "m": {}})");
}

TEST(ReadJson, RefusesWhatWouldChange) {
  const auto fault = [](const std::string& text) {
    return error_text<DataError>([&] { read_json(text, "x.jsonl, line 2"); });
  };
  EXPECT_EQ(fault(R"({"a": 1, "a": 2})"),
            R"(x.jsonl, line 2: its key "a" is there twice in one object: expected it once)");
  EXPECT_EQ(fault(R"({"a": 18446744073709551615})"),
            "x.jsonl, line 2: the number 18446744073709551615 does not fit into 64 bits");
  EXPECT_EQ(fault(R"({"a": -99999999999999999999})"),
            "x.jsonl, line 2: the number -99999999999999999999 does not fit into 64 bits");
  EXPECT_THAT(fault(R"({"a": )"), HasSubstr("x.jsonl, line 2: not valid JSON at column"));
  EXPECT_EQ(fault("3"), "x.jsonl, line 2: expected a JSON object or a list");
  EXPECT_THAT(fault(std::string(1000, '[')), HasSubstr("nests deeper than 100 levels"));
  EXPECT_THAT(fault("{\"a\": \"\xFF\"}"), HasSubstr("x.jsonl, line 2: not valid JSON"));
}

TEST(Dict, FindsKeysInLargeDictsToo) {
  std::vector<std::pair<Value, Value>> entries;
  for (int i = 0; i < 1000; ++i) entries.emplace_back(Value("k" + std::to_string(i)), Value(i));
  entries.emplace_back(Value(1), Value("one"));
  entries.emplace_back(Value("k7"), Value("seven"));
  const Value dict = Value::dict(std::move(entries));
  EXPECT_EQ(dict.dict().entries().size(), 1001u);
  EXPECT_EQ(dict.dict().named("k999")->integer(), 999);
  EXPECT_EQ(dict.dict().named("k7")->text(), "seven");
  EXPECT_EQ(dict.dict().find(Value(true))->text(), "one");
  EXPECT_EQ(dict.dict().named("x"), nullptr);
}

}  // namespace
}  // namespace phalanx::jinja
