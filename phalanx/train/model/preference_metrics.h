// What a batch or a data set of preferences ([dpo]) says of the model: means over its pairs.
#pragma once

namespace phalanx::train {

struct PreferenceMetrics {
  double chosen = 0, rejected = 0;  // rewards (preference_loss.h)
  double accuracy = 0;              // the share of pairs whose chosen answer has the higher reward
  double margin() const { return chosen - rejected; }
};

}  // namespace phalanx::train
