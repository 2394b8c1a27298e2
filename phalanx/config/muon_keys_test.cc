// [muon] and [ema].
#include <gtest/gtest.h>

#include "phalanx/config/testing/parse.h"
#include "phalanx/config/training_shape.h"

namespace phalanx::config::muon_keys_test {
namespace {

std::string refusal_of_muon(const std::string& lines) {
  return refusal("[optimizer]\nname = \"Muon\"\n[muon]\n" + lines);
}

TEST(MuonKeys, AreReadAndPrinted) {
  const std::vector<double> numbers = {2, -1.5, 0.5};
  const TrainConfig config = parse("[muon]\nns_coefficients = [2, -1.5, 0.5]\nlr = 0.02\nweight_decay = 0\n");
  EXPECT_EQ(config.muon.ns_coefficients, numbers);
  EXPECT_EQ(config.muon.lr, 0.02);
  EXPECT_EQ(config.muon.weight_decay, 0);
  EXPECT_EQ(parse(print_config(config)).muon.ns_coefficients, numbers);
  EXPECT_EQ(parse(print_config(config)).muon.lr, 0.02);
  EXPECT_EQ(parse("", {"--muon.ns_coefficients=2, -1.5, 0.5"}).muon.ns_coefficients, numbers);
  EXPECT_EQ(parse("", {"--muon.ns_coefficients=[2, -1.5, 0.5]"}).muon.ns_coefficients, numbers);
  const TrainConfig plain = parse(print_config(TrainConfig()));
  EXPECT_FALSE(plain.muon.lr || plain.muon.weight_decay);
  EXPECT_EQ(plain.muon.ns_coefficients, TrainConfig().muon.ns_coefficients);
}

TEST(MuonKeys, SayWhatIsWrongWithThem) {
  EXPECT_THAT(refusal_of_muon("ns_coefficients = [1, 2]\n"),
              HasSubstr("[muon] ns_coefficients has 2 numbers: expected three, as [3.4445, -4.775, 2.0315]"));
  EXPECT_THAT(refusal_of_muon("ns_coefficients = [1, \"2\", 3]\n"), HasSubstr("expected a list of numbers"));
  EXPECT_THAT(refusal_of_muon("ns_coefficients = 1\n"), HasSubstr("expected a list of numbers"));
  EXPECT_THAT(refusal("", {"--muon.ns_coefficients=1,x,3"}), HasSubstr("expected a list of numbers"));
  EXPECT_THAT(refusal_of_muon("momentum = 1\n"), HasSubstr("[muon] momentum is 1: expected 0 <= momentum < 1"));
  EXPECT_THAT(refusal_of_muon("ns_steps = 0\n"), HasSubstr("[muon] ns_steps is 0: expected an integer from 1 to 99"));
  EXPECT_THAT(refusal_of_muon("adjust_lr_fn = \"rms\"\n"),
              HasSubstr("expected one of \"original\", \"match_rms_adamw\""));
  EXPECT_THAT(refusal_of_muon("lr = 0.02\n[optimizer.x]\n"), HasSubstr("unknown key [optimizer] x"));
  EXPECT_THAT(refusal("[optimizer]\nname = \"Muon\"\nlr = 0\n[muon]\nlr = 0.02\n"),
              HasSubstr("[muon] lr is 0.02, but [optimizer] lr, whose schedule it follows, is 0"));
  EXPECT_THAT(refusal("[optimizer]\nname = \"Muon\"\nbeta2 = 1\n"), HasSubstr("[optimizer] beta2 is 1"));
  EXPECT_THAT(refusal("[ema]\ndecay = 1\n"), HasSubstr("[ema] decay is 1: the average would never change"));
  EXPECT_THAT(refusal("[ema]\nupdate_every = 0\n"),
              HasSubstr("[ema] update_every is 0: expected an integer, 1 or more"));
}

TEST(MuonKeys, WithoutEffectAreSaid) {
  const auto notes_of = [](const std::vector<std::string>& flags) {
    std::vector<std::string> notes;
    read_config("/dev/null", flags, &notes);
    return notes;
  };
  EXPECT_THAT(notes_of({"--muon.lr=0.1"}), ElementsAre("[muon] has no effect: [optimizer] name is \"AdamW\""));
  EXPECT_THAT(notes_of({"--muon.lr=0.1", "--optimizer.name=Muon"}), IsEmpty());
  EXPECT_THAT(notes_of({"--ema.use_in_export"}), ElementsAre("[ema] has no effect: decay is 0"));
}

TEST(MuonKeys, TheStateIsCounted) {
  const auto copies = [](const std::vector<std::string>& flags) {
    const OptimizerCopies found = optimizer_copies(parse("", flags));
    return std::pair(found.others, found.matrices);
  };
  EXPECT_EQ(copies({}), std::pair(2L, 2L));
  EXPECT_EQ(copies({"--optimizer.name=Muon"}), std::pair(2L, 1L));
  EXPECT_EQ(copies({"--optimizer.name=Muon", "--ema.decay=0.9"}), std::pair(3L, 2L));
  EXPECT_EQ(copies({"--optimizer.name=Lion"}), std::pair(1L, 1L));
  EXPECT_EQ(copies({"--optimizer.name=SGD"}), std::pair(0L, 0L));
  EXPECT_EQ(copies({"--optimizer.name=SGD", "--optimizer.momentum=0.9", "--ema.decay=0.9"}), std::pair(2L, 2L));
}

}  // namespace
}  // namespace phalanx::config::muon_keys_test
