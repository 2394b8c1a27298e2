// WeightAverage: an exponential moving average of weights (EMA), which often validates better than the weights.
//
//   a <- decay * a + (1 - decay) * p        after a step
//   a <- p                                  up to start_step
//
// Averages can take the place of the weights for a while:
//
//   WeightAverage average(parameters, {.decay = 0.999});
//   optimizer.step(lr);
//   average.update(step);                   // steps count from 1
//   average.swap();                         // now the parameters hold the averages, and `average` the weights
//   validate();
//   average.swap();                         // back, to the bit
//
// Averages are laid out over the ranks as the parameters, and nothing is communicated. Elements of float32 on the CPU
// get the same bits in every layout. State: "ema.<fqn>", with the values that the parameters have when this is made.
// REQUIRES: no state is collected, and no update made, between two swaps.
#pragma once

#include <cstdint>
#include <vector>

#include "phalanx/tensor/named.h"
#include "phalanx/tensor/train_state.h"

namespace phalanx {

struct WeightAverageOptions {
  double decay = 0.999;
  std::int64_t start_step = 0;
  std::int64_t update_every = 1;  // steps from one update to the next
};

class WeightAverage {
 public:
  /// Throws ConfigError for options out of range, Error for 16-bit parameters: small changes would be lost in them.
  WeightAverage(std::vector<NamedTensor> parameters, WeightAverageOptions options);

  /// `skip`: 0-dim float32 on the parameters' device, read there; 1: nothing changes; undefined: 0.
  void update(std::int64_t step, const at::Tensor& skip = {});
  void swap();
  void collect_state(TrainState& state) const;

 private:
  void blend(double weight, const at::Tensor& skip);

  std::vector<NamedTensor> parameters_;
  WeightAverageOptions options_;
  std::vector<at::Tensor> averages_;
};

}  // namespace phalanx
