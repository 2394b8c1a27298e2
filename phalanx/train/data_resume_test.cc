#include "phalanx/train/data_resume.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/data/stream_description.h"
#include "phalanx/data/testing/small_data.h"

namespace phalanx::train {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class DataResumeTest : public ::testing::Test {
 protected:
  data::Batches batches(data::BatchOptions options) const { return {tokens_, options}; }
  std::string refused(const data::Batches& now, const nlohmann::json& saved, std::int64_t tokens) const {
    return error_text<CheckpointError>([&] { resume_data(config_, now, saved, {{kDataTokens, tokens}}); });
  }
  TrainConfig config_;
  TempDirectory folder_{"data-resume"};
  data::TokenFile tokens_ = data::counting_file(folder_.path() / "t.bin", 1001);
};

TEST_F(DataResumeTest, GoesOnAtTheNextTokenOrIsRefusedUnlessAskedFor) {
  const data::Batches before = batches({.seq_len = 10, .global_batch_size = 4, .seed = 3});
  const auto saved = data::describe_stream(before);
  const DataResume same = resume_data(config_, before, saved, {{kDataTokens, 2 * 1000 + 130}});
  EXPECT_EQ(same.position, (data::StreamPosition{2, 130}));
  EXPECT_THAT(same.lines, IsEmpty());

  const data::Batches longer = batches({.seq_len = 20, .global_batch_size = 4, .seed = 3});
  EXPECT_THAT(refused(longer, saved, 130),
              AllOf(HasSubstr("[training] seq_len"), HasSubstr("allow_data_mismatch = true")));
  EXPECT_EQ(refused(longer, saved, 1000), "");  // between two epochs
  const data::Batches other = batches({.seq_len = 10, .global_batch_size = 4, .shuffle = false});
  EXPECT_THAT(refused(other, saved, 130), HasSubstr("[training] shuffle"));

  config_.checkpoint.allow_data_mismatch = true;
  const DataResume anew = resume_data(config_, other, saved, {{kDataTokens, 130}});
  EXPECT_EQ(anew.position, data::StreamPosition{});
  EXPECT_THAT(anew.lines, ElementsAre(AllOf(HasSubstr("allow_data_mismatch"), HasSubstr("begin at their beginning"),
                                            HasSubstr("[training] shuffle"))));
}

TEST_F(DataResumeTest, AnOlderCheckpointCountsSequencesAndIsNotCompared) {
  const data::Batches now = batches({.seq_len = 10, .global_batch_size = 4, .seed = 3});
  const DataResume old = resume_data(config_, now, nlohmann::json::object(), {{kDataSequences, 213}});
  EXPECT_EQ(old.position, (data::StreamPosition{2, 130}));
  EXPECT_THAT(old.lines,
              ElementsAre(AllOf(HasSubstr("could not be compared"), HasSubstr("after 213 sequences of 10"))));
  EXPECT_THROW(resume_data(config_, now, nlohmann::json::object(), {}), CheckpointError);
}

TEST_F(DataResumeTest, AMalformedDescriptionIsAnErrorOfTheCheckpoint) {
  const data::Batches now = batches({.seq_len = 10, .global_batch_size = 4});
  auto saved = data::describe_stream(now);
  saved["version"] = 9;
  EXPECT_THAT(refused(now, saved, 10), HasSubstr("version 9"));
}

}  // namespace
}  // namespace phalanx::train
