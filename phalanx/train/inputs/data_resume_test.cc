#include "phalanx/train/inputs/data_resume.h"

#include <gtest/gtest.h>

#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/stream_description.h"
#include "phalanx/data/testing/small_data.h"

namespace phalanx::train {
namespace {

class DataResumeTest : public ::testing::Test {
 protected:
  data::DataLoader dataloader(data::DataLoaderOptions options) const { return {tokens_, options}; }
  std::string refused(const data::DataLoader& now, const nlohmann::json& saved, std::int64_t tokens) const {
    return error_text<CheckpointError>([&] { resume_data(config_, now, saved, {{data::kTokensRead, tokens}}); });
  }
  config::TrainConfig config_;
  TempDirectory folder_{"data-resume"};
  data::TokenFile tokens_ = data::counting_file(folder_.path() / "t.bin", 1001);
};

TEST_F(DataResumeTest, GoesOnAtTheNextTokenOrIsRefusedUnlessAskedFor) {
  const data::DataLoader before = dataloader({.seq_len = 10, .global_batch_size = 4, .seed = 3});
  const auto saved = data::describe_stream(before);
  const DataResume same = resume_data(config_, before, saved, {{data::kTokensRead, 2 * 1000 + 130}});
  EXPECT_EQ(same.position, (data::StreamPosition{2, 130}));
  EXPECT_THAT(same.lines, IsEmpty());

  const data::DataLoader longer = dataloader({.seq_len = 20, .global_batch_size = 4, .seed = 3});
  EXPECT_THAT(refused(longer, saved, 130),
              AllOf(HasSubstr("[training] seq_len"), HasSubstr("allow_data_mismatch = true")));
  EXPECT_EQ(refused(longer, saved, 1000), "");  // between two epochs
  const data::DataLoader other = dataloader({.seq_len = 10, .global_batch_size = 4, .shuffle = false});
  EXPECT_THAT(refused(other, saved, 130), HasSubstr("[training] shuffle"));

  config_.checkpoint.allow_data_mismatch = true;
  const DataResume anew = resume_data(config_, other, saved, {{data::kTokensRead, 130}});
  EXPECT_EQ(anew.position, data::StreamPosition{});
  EXPECT_THAT(anew.lines, ElementsAre(AllOf(HasSubstr("allow_data_mismatch"), HasSubstr("begin at their beginning"),
                                            HasSubstr("[training] shuffle"))));
}

TEST_F(DataResumeTest, AnOlderCheckpointCountsSequencesAndIsNotCompared) {
  const data::DataLoader now = dataloader({.seq_len = 10, .global_batch_size = 4, .seed = 3});
  const DataResume old = resume_data(config_, now, nlohmann::json::object(), {{kDataSequences, 213}});
  EXPECT_EQ(old.position, (data::StreamPosition{2, 130}));
  EXPECT_THAT(old.lines, IsEmpty()) << "the line that names what could not be compared says it";
  EXPECT_THAT(old.taken_as, HasSubstr("after 213 sequences of 10"));
  EXPECT_THROW(resume_data(config_, now, nlohmann::json::object(), {}), CheckpointError);
}

TEST_F(DataResumeTest, AnOlderCheckpointKnowsTheSeedOfItsOrder) {
  const auto old = [&](const data::DataLoader& now) {
    return resume_data(config_, now, nlohmann::json::object(), {{kDataSequences, 13}, {kDataSeed, 3}});
  };
  const auto message = [&](const data::DataLoader& now) { return error_text<CheckpointError>([&] { old(now); }); };
  const data::DataLoader shuffled = dataloader({.seq_len = 10, .global_batch_size = 4, .seed = 4});
  config_.debug.seed = 3;
  EXPECT_EQ(message(shuffled), "");
  config_.debug.seed = 4;
  EXPECT_THAT(message(shuffled), AllOf(HasSubstr("[debug] seed: the checkpoint's run had 3, this one has 4"),
                                       HasSubstr("allow_data_mismatch = true")));
  EXPECT_EQ(message(dataloader({.seq_len = 10, .global_batch_size = 4, .shuffle = false})), "");
  config_.checkpoint.allow_data_mismatch = true;
  const DataResume anew = old(shuffled);
  EXPECT_EQ(anew.position, data::StreamPosition{});
  EXPECT_THAT(anew.lines, ElementsAre(AllOf(HasSubstr("begin at their beginning"), HasSubstr("[debug] seed"))));
}

TEST_F(DataResumeTest, ADescriptionWithoutAPositionIsAnError) {
  const data::DataLoader now = dataloader({.seq_len = 10, .global_batch_size = 4});
  EXPECT_THROW(resume_data(config_, now, data::describe_stream(now), {{kDataSequences, 3}}), CheckpointError);
}

TEST_F(DataResumeTest, AMalformedDescriptionIsAnErrorOfTheCheckpoint) {
  const data::DataLoader now = dataloader({.seq_len = 10, .global_batch_size = 4});
  auto saved = data::describe_stream(now);
  saved["version"] = 9;
  EXPECT_THAT(refused(now, saved, 10), HasSubstr("version 9"));
}

}  // namespace
}  // namespace phalanx::train
