// The texts of the lecture and the sources that it quotes, as the build embeds them (cmake/PhalanxEmbed.cmake).
#pragma once

#include <string_view>

namespace phalanx::lecture {

struct EmbeddedText {
  std::string_view text, sha256;
};

/// The beginning of docs/lecture.md, and its end: which section teaches what.
extern const EmbeddedText kOpeningText, kTableText;

extern const EmbeddedText kWhyText, kHardwareText, kCollectivesText, kRingText, kBackendsText, kBenchmarkText,
    kStreamsText, kJobsText, kDataParallelText, kZeroText, kTensorText, kPipelineText, kSequenceText, kHybridsText,
    kInferenceText, kSummaryText;

extern const EmbeddedText kCollectivesTour, kDdpByHand, kLifecycle, kLlamaShardedTensorParallel, kOverlap,
    kPipelineByHand, kRing, kTensorParallelByHand, kTensorParallelToy, kTracedStream, kTwoNodesLauncher, kZero3ByHand,
    kMachineSteps, kModelParallelSteps;

}  // namespace phalanx::lecture
