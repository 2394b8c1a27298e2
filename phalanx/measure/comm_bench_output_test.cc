#include "phalanx/measure/comm_bench_output.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/base/testing/xml.h"
#include "phalanx/measure/comm_bench_plot.h"

namespace phalanx::measure {
namespace {

CommBenchRow row_of(BenchVerb verb, const std::string& backend, std::int64_t bytes, double p50) {
  return {.what = {.verb = verb, .count = bytes / 4},
          .backend = backend,
          .ranks = 4,
          .p50 = p50,
          .p99 = 2 * p50,
          .least = p50 / 2,
          .cpu = p50,
          .slowest_rank = 3,
          .calls = 100,
          .rounds = 3,
          .wrong = 0,
          .copy_seconds = p50 / 2,
          .baselines = {{"c10d", 8 * p50}}};
}

CommBenchResult some_result() {
  CommBenchResult result{
      .ranks = 4, .host = "host", .cpu = "Brand & Sons <CPU>", .device = "cpu", .cores = 2, .baselines = {"c10d"}};
  for (const std::int64_t bytes : {4 << 10, 1 << 20, 64 << 20}) {
    result.rows.push_back(row_of(BenchVerb::all_reduce, "shm", bytes, 1e-9 * static_cast<double>(bytes)));
    result.rows.push_back(row_of(BenchVerb::all_reduce, "c10d", bytes, 8e-9 * static_cast<double>(bytes)));
    result.rows.push_back(row_of(BenchVerb::all_gather, "shm", bytes, 2e-9 * static_cast<double>(bytes)));
  }
  result.rows.push_back(row_of(BenchVerb::barrier, "shm", 0, 3e-6));
  return result;
}

TEST(CommBenchOptions, SizesAreMultiplied) {
  EXPECT_THAT(size_range(4, 64, 4, 0), ElementsAre(4, 16, 64));
  EXPECT_THAT(size_range(4, 63, 4, 0), ElementsAre(4, 16));
  EXPECT_THAT(size_range(100, 400, 2, 150), ElementsAre(100, 250, 400));
  EXPECT_THAT(size_range(1, 4, 1.1, 0), ElementsAre(1, 2, 3, 4));  // each size is larger than the one before
  EXPECT_THAT(error_text<UsageError>([] { size_range(64, 4, 2, 0); }), HasSubstr("sizes from 64 to 4"));
  EXPECT_THAT(error_text<UsageError>([] { size_range(4, 64, 1, 0); }), HasSubstr("step factor is 1"));
  EXPECT_EQ(size_text(64 << 10), "64K");
  EXPECT_EQ(size_text(1000), "1000");
}

TEST(CommBenchOptions, NamesAreKnownOrTheNearestIsOffered) {
  EXPECT_THAT(parse_verbs("--ops", "all_reduce,pingpong"), ElementsAre(BenchVerb::all_reduce, BenchVerb::pingpong));
  EXPECT_EQ(parse_verbs("--ops", "all").size(), 11U);
  EXPECT_THAT(parse_types("-d", "float,bf16,int32"), ElementsAre(DataType::f32, DataType::bf16, DataType::i32));
  EXPECT_EQ(parse_types("-d", "all").size(), 8U);
  EXPECT_THAT(parse_ops("-o", "prod,avg"), ElementsAre(ReduceOp::product, ReduceOp::avg));
  EXPECT_THAT(error_text<UsageError>([] { parse_verbs("--ops", "all_redcue"); }),
              HasSubstr("did you mean 'all_reduce'?"));
  EXPECT_THAT(error_text<UsageError>([] { parse_types("--datatype", "float33"); }), HasSubstr("--datatype: 'float33'"));
  EXPECT_THAT(error_text<UsageError>([] { parse_places("--place", "there"); }), HasSubstr("expected in, out or both"));
}

TEST(CommBenchOptions, CasesHaveTheFormsThatTheVerbsHave) {
  CommBenchOptions options;
  options.verbs = {BenchVerb::all_reduce, BenchVerb::all_gather, BenchVerb::all_to_all, BenchVerb::barrier};
  options.sizes = {10, 1000};
  options.ops = {ReduceOp::sum, ReduceOp::max};
  options.places = {Place::out, Place::in};
  const auto cases = bench_cases(options, 3);
  // all_reduce: 2 ops x 2 sizes, in place; all_gather: 2 places x 2 sizes; all_to_all: 2 sizes, out; barrier: once.
  ASSERT_EQ(cases.size(), 4U + 4U + 2U + 1U);
  EXPECT_EQ(cases[0].place, Place::in);
  EXPECT_EQ(cases[0].count, 3);  // at least one element for each rank
  EXPECT_EQ(cases[1].count, 249);
  EXPECT_EQ(cases[4].place, Place::out);
  EXPECT_EQ(cases[6].place, Place::in);
  EXPECT_EQ(cases.back().bytes(), 0);
}

TEST(CommBenchOptions, WhatCannotBeMeasuredIsRefused) {
  CommBenchOptions options;
  options.sizes = {4096};
  EXPECT_THAT(error_text<UsageError>([&] { check_options(options, 1); }),
              HasSubstr("pingpong and sendrecv need two ranks"));
  options.root = 2;
  EXPECT_THAT(error_text<UsageError>([&] { check_options(options, 2); }),
              HasSubstr("--root is 2: expected a rank, 0 to 1"));
  options.root = 0;
  options.ops = {ReduceOp::avg};
  options.types = {DataType::f32, DataType::i32};
  EXPECT_THAT(error_text<UsageError>([&] { check_options(options, 2); }), HasSubstr("avg is for floating point types"));
  options.types = {DataType::f32};
  options.backends = {"shm", "shm"};
  EXPECT_THAT(error_text<UsageError>([&] { check_options(options, 2); }), HasSubstr("names shm twice"));
  options.backends = {"shm", ""};
  EXPECT_THAT(error_text<UsageError>([&] { check_options(options, 2); }), HasSubstr("empty name"));
}

TEST(CommBenchOutput, BandwidthsHaveTheStandardFactors) {
  EXPECT_DOUBLE_EQ(bus_factor(BenchVerb::all_reduce, 4), 1.5);
  for (const BenchVerb verb : {BenchVerb::all_gather, BenchVerb::reduce_scatter, BenchVerb::gather, BenchVerb::scatter,
                               BenchVerb::all_to_all}) {
    EXPECT_DOUBLE_EQ(bus_factor(verb, 4), 0.75);
  }
  for (const BenchVerb verb :
       {BenchVerb::broadcast, BenchVerb::reduce, BenchVerb::sendrecv, BenchVerb::pingpong, BenchVerb::barrier}) {
    EXPECT_DOUBLE_EQ(bus_factor(verb, 4), 1);
  }
  // 1 GB in 0.5 s over 4 ranks. The copy takes half as long, so half of the roofline is reached.
  const CommBenchRow row = row_of(BenchVerb::all_reduce, "shm", 1'000'000'000, 0.5);
  EXPECT_DOUBLE_EQ(row.algbw(), 2);
  EXPECT_DOUBLE_EQ(row.busbw(), 3);
  EXPECT_DOUBLE_EQ(*row.copy_share(), 0.5);
}

TEST(CommBenchOutput, PercentilesAreOfTheNearestRank) {
  struct Case {
    std::size_t values;
    int percent;
    std::size_t rank;  // from 1
  };
  for (const auto& [values, percent, rank] :
       std::vector<Case>{{1, 50, 1},     {2, 50, 1},     {3, 50, 2},       {4, 50, 2},        {7, 50, 4},
                         {100, 50, 50},  {101, 50, 51},  {1, 99, 1},       {2, 99, 2},        {3, 99, 3},
                         {7, 99, 7},     {99, 99, 99},   {100, 99, 99},    {101, 99, 100},    {200, 99, 198},
                         {201, 99, 199}, {300, 99, 297}, {5000, 99, 4950}, {5000, 100, 5000}, {5000, 0, 1}}) {
    std::vector<double> sorted(values);
    std::iota(sorted.begin(), sorted.end(), 1.0);
    EXPECT_EQ(percentile(sorted, percent), static_cast<double>(rank)) << "p" << percent << " of " << values;
  }
  EXPECT_EQ(percentile({}, 99), 0);
}

TEST(CommBenchOutput, TableLinesStandUnderTheirHeadings) {
  const CommBenchResult result = some_result();
  const std::string header = table_header(result);
  const std::string titles = header.substr(header.find('\n') + 1);
  for (const CommBenchRow& row : result.rows)
    EXPECT_EQ(table_line(row, result.baselines).size(), titles.size()) << table_line(row, result.baselines);
  EXPECT_THAT(table_line(result.rows[0], result.baselines), HasSubstr(" 8.0x\n"));
  EXPECT_THAT(table_line(result.rows[1], result.baselines),
              EndsWith(" -\n"));  // c10d is not compared with itself
  EXPECT_LT(titles.size(), 160U);
}

TEST(CommBenchOutput, CsvAndJsonHoldTheSame) {
  const CommBenchResult result = some_result();
  const auto json = nlohmann::json::parse(to_json(result));
  EXPECT_EQ(json["ranks"], 4);
  ASSERT_EQ(json["rows"].size(), result.rows.size());
  EXPECT_EQ(json["rows"][0]["op"], "all_reduce");
  EXPECT_DOUBLE_EQ(json["rows"][0]["busbw_gbs"], 1.5);
  EXPECT_EQ(json["rows"][0]["reduce_op"], "sum");
  EXPECT_EQ(json["rows"][2]["reduce_op"], "-");

  std::istringstream csv(to_csv(result));
  std::string line;
  std::getline(csv, line);
  EXPECT_EQ(static_cast<std::size_t>(std::ranges::count(line, ',')) + 1, json["rows"][0].size());
  std::size_t rows = 0;
  for (; std::getline(csv, line); ++rows) {
    EXPECT_EQ(static_cast<std::size_t>(std::ranges::count(line, ',')) + 1, json["rows"][0].size()) << line;
  }
  EXPECT_EQ(rows, result.rows.size());
}

TEST(CommBenchPlot, IsOneWellFormedPicture) {
  const std::string svg = comm_bench_plot(some_result());
  const auto count = [&](const std::string& part) {
    int found = 0;
    for (std::size_t at = svg.find(part); at != std::string::npos; at = svg.find(part, at + 1)) ++found;
    return found;
  };
  EXPECT_NO_THROW(parse_xml(svg));
  EXPECT_EQ(count("stroke-dasharray"), 1 + 4);  // the legend, and two charts of two verbs
  EXPECT_EQ(count("fill=\"none\""), 2 * (2 + 1) + 2 * (1 + 1));
  // Markers distinguish the lines too: circles for the first, squares for the second, also in the legend.
  EXPECT_EQ(count("d=\"M-3.5 0a3.5 "), 2 * 2 * 3 + 1);
  EXPECT_EQ(count("d=\"M-3-3h6v6h-6z\""), 2 * 3 + 1);
  EXPECT_THAT(svg, HasSubstr("Brand &amp; Sons &lt;CPU&gt;"));
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg, Not(HasSubstr("inf\"")));

  CommBenchResult one_rank = some_result();  // moves no data over a bus
  one_rank.ranks = 1;
  for (CommBenchRow& row : one_rank.rows) row.ranks = 1;
  EXPECT_THAT(comm_bench_plot(one_rank), Not(HasSubstr("nan")));
  EXPECT_THAT(comm_bench_plot({}), HasSubstr("no rows with bytes"));
}

}  // namespace
}  // namespace phalanx::measure
