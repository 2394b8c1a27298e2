#include "phalanx/infer/jobs/batch_job.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/infer/jobs/prompts.h"

namespace phalanx::infer {
namespace {

TEST(BatchJob, ResultsOfAllPartsComeInTheOrderOfThePrompts) {
  const TempDirectory scratch("batch_job");
  const auto folder = scratch.path() / "answers";
  const nlohmann::json description = {{"seed", 1}};
  for (const int rank : {0, 1}) {
    BatchJob job(folder);
    job.open(description);
    job.begin(rank);
    job.add(rank == 0 ? 2 : 0, {{"id", rank}, {"text", "a\nb"}});
  }
  const BatchJob job(folder);
  EXPECT_THAT(job.finished(3), ElementsAre(true, false, true));
  EXPECT_THAT(error_text([&] { job.merge(3, "all.jsonl"); }), HasSubstr("no result of prompt 2"));
  EXPECT_FALSE(std::filesystem::exists(folder / "all.jsonl"));
  BatchJob more(folder);
  more.begin(7);
  more.add(1, {{"id", "x"}});
  more.merge(3, "all.jsonl");
  EXPECT_EQ(read_file(folder / "all.jsonl"),
            "{\"id\":1,\"text\":\"a\\nb\"}\n{\"id\":\"x\"}\n{\"id\":0,\"text\":\"a\\nb\"}\n");
}

TEST(BatchJob, AResultThatWasBeingWrittenCountsAsNotThere) {
  const TempDirectory scratch("batch_job");
  const auto part = scratch.path() / "part-00000.jsonl";
  BatchJob job(scratch.path());
  job.open({{"seed", 1}});
  job.begin(0);
  job.add(1, {{"id", 1}});
  std::ofstream(part, std::ios::app) << "{\"index\":0,\"rec";
  BatchJob again(scratch.path());
  again.open({{"seed", 1}});
  EXPECT_THAT(again.finished(2), ElementsAre(false, true));
  again.begin(0);
  again.add(0, {{"id", 0}});
  again.merge(2, "all.jsonl");
  EXPECT_EQ(read_file(scratch.path() / "all.jsonl"), "{\"id\":0}\n{\"id\":1}\n");
}

TEST(BatchJob, AnIdAsDeepAsAPromptsMayBeIsTakenBack) {
  const TempDirectory scratch("batch_job");
  // The prompt's line is one level around it, which makes 100.
  const std::string id = std::string(99, '[') + std::string(99, ']');
  const auto prompts = parse_prompts("{\"ids\": [1], \"id\": " + id + "}", "p.jsonl");
  BatchJob job(scratch.path());
  job.open({{"seed", 1}});
  job.begin(0);
  job.add(0, {{"id", nlohmann::json::parse(prompts.all[0].id)}});
  EXPECT_THAT(job.finished(1), ElementsAre(true));
}

TEST(BatchJob, EveryDifferenceIsNamedWithBothValues) {
  const TempDirectory scratch("batch_job");
  BatchJob job(scratch.path());
  EXPECT_THAT(job.open({{"seed", 1}, {"weights", {{"step", 10}, {"hash", "aa"}}}, {"dtype", "float32"}}), IsEmpty());
  EXPECT_THAT(job.open({{"seed", 1}, {"weights", {{"step", 10}, {"hash", "aa"}}}, {"dtype", "float32"}}), IsEmpty());
  EXPECT_THAT(error_text([&] {
                job.open({{"seed", 2}, {"weights", {{"step", 20}, {"hash", "aa"}}}, {"dtype", "float32"}});
              }),
              HasSubstr("its seed is 1, this one's 2; its weights.step is 10, this one's 20; give what"));
}

TEST(BatchJob, ATextThatIsNoUtf8IsTheSameTextAgain) {
  const TempDirectory scratch("batch_job");
  BatchJob job(scratch.path());
  for (int time = 0; time < 2; ++time) EXPECT_THAT(job.open({{"stop", "a\xff"}}), IsEmpty());
}

TEST(BatchJob, AFolderOfPathsGoesOnAndSaysWhatCouldNotBeCompared) {
  const TempDirectory scratch("batch_job");
  const auto path = scratch.path() / "job.json";
  write_file(path, R"({"model": "/a/step-10", "seed": 1, "tokenizer": ""})");
  BatchJob job(scratch.path());
  const nlohmann::json now = {{"seed", 1}, {"tokenizer", "17"}, {"weights", {{"hash", "aa"}}}};
  nlohmann::json other = now;
  other["seed"] = 2;
  EXPECT_THAT(error_text([&] { job.open(other); }), HasSubstr("its seed is 1, this one's 2"));
  EXPECT_THAT(job.open(now), ElementsAre("tokenizer", "weights"));
  EXPECT_THAT(job.open(now), IsEmpty());
  other = now;
  other["weights"]["hash"] = "bb";
  EXPECT_THAT(error_text([&] { job.open(other); }), HasSubstr("its weights.hash is \"aa\", this one's \"bb\""));
  write_file(path, R"({"format": 3, "seed": 1})");
  EXPECT_THAT(error_text([&] { job.open(now); }), HasSubstr("its format is 3: this program reads formats up to 2"));
}

TEST(BatchJob, SampledAnswersOfTheFirstFormatAreNotGoneOnWith) {
  const TempDirectory scratch("batch_job");
  BatchJob job(scratch.path());
  const std::string begun = R"({"model": "/a/step-10", "seed": 1, "temperature": 0.5, "tokenizer": ""})";
  write_file(scratch.path() / "job.json", begun);
  EXPECT_THAT(error_text([&] {
                job.open({{"seed", 1}, {"temperature", 0.5}});
              }),
              AllOf(HasSubstr("by another seed (its temperature is 0.5)"), HasSubstr("remove it")));
  EXPECT_EQ(read_file(scratch.path() / "job.json"), begun);
  write_file(scratch.path() / "job.json", R"({"model": "/a/step-10", "seed": 1, "temperature": 0, "tokenizer": ""})");
  EXPECT_THAT(job.open({{"seed", 1}, {"temperature", 0.0}}), IsEmpty());
}

TEST(BatchJob, AnotherJobsFolderAndSpoiledPartsAreNamed) {
  const TempDirectory scratch("batch_job");
  BatchJob job(scratch.path());
  job.open({{"seed", 1}, {"prompts", "a.jsonl"}});
  EXPECT_THAT(error_text([&] {
                job.open({{"seed", 2}, {"prompts", "a.jsonl"}});
              }),
              HasSubstr("is the folder of another job: its seed is 1, this one's 2"));
  EXPECT_THAT(error_text([&] {
                job.open({{"seed", 1}, {"prompts", "a.jsonl"}, {"stop", {"x"}}});
              }),
              HasSubstr("its stop is null, this one's [\"x\"]"));
  EXPECT_THAT(error_text([&] { job.open({{"seed", 1}}); }), HasSubstr("its prompts is \"a.jsonl\", this one's null"));
  for (const char* line :
       {"{\"index\": 2, \"record\": {}}", "{\"index\": -1, \"record\": {}}", "{\"index\": 0}", "x"}) {
    write_file(scratch.path() / "part-00000.jsonl", std::string(line) + "\n");
    EXPECT_THAT(error_text([&] { job.finished(2); }),
                HasSubstr("part-00000.jsonl, line 1: expected {\"index\": 0 to 1"));
  }
  const std::string deep = std::string(200000, '[') + std::string(200000, ']');
  write_file(scratch.path() / "part-00000.jsonl", "{\"index\": 0, \"record\": {\"id\": " + deep + "}}\n");
  EXPECT_THAT(error_text([&] { job.finished(2); }), HasSubstr("part-00000.jsonl, line 1: expected"));
  write_file(scratch.path() / "job.json", "[]");
  EXPECT_THAT(error_text([&] { job.open({{"seed", 1}}); }), HasSubstr("job.json: expected a JSON object"));
  std::filesystem::remove(scratch.path() / "job.json");
  EXPECT_THAT(error_text([&] { job.open({{"seed", 1}}); }), HasSubstr("has results but no job.json"));
}

}  // namespace
}  // namespace phalanx::infer
