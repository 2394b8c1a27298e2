#include "phalanx/train/ranks/exchange_step_metrics.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

namespace phalanx::train {

GlobalStepMetrics exchange_step_metrics(const RankStepMetrics& mine, Communicator& world, std::int64_t data_ranks) {
  const double fields[] = {mine.loss,
                           mine.should_stop ? 1.0 : 0.0,
                           mine.data_seconds,
                           mine.memory_gib,
                           mine.cpu_seconds,
                           mine.comm_seconds,
                           mine.exposed_seconds,
                           mine.wall_seconds,
                           mine.save_ended ? 1.0 : 0.0,
                           mine.mean_loss,
                           static_cast<double>(mine.label_count),
                           mine.pairs,
                           mine.preferences[0],
                           mine.preferences[1],
                           mine.preferences[2],
                           mine.preferences[3]};
  constexpr std::int64_t kFields = std::ssize(fields);
  const int size = world.size();
  // On the host, even if the device is a GPU. So an error between the ranks in this step is thrown here, before
  // anything that the device has computed since is read.
  const at::Tensor host = at::empty({size, kFields}, at::TensorOptions(at::kDouble));
  world.all_gather(host, at::tensor(at::ArrayRef<double>(fields, kFields), at::TensorOptions(at::kDouble)));
  double labels = 0;
  GlobalStepMetrics totals{.max_loss = -std::numeric_limits<double>::infinity()};
  const auto* values = host.const_data_ptr<double>();
  for (int r = 0; r < size; ++r, values += kFields) {
    totals.loss += values[0] * static_cast<double>(data_ranks) / size;
    labels += values[10] * static_cast<double>(data_ranks) / size;
    totals.pairs += values[11] * static_cast<double>(data_ranks) / size;
    for (std::size_t i = 0; i < totals.preferences.size(); ++i) totals.preferences[i] += values[12 + i];
    if (values[9] > totals.max_loss) totals.max_loss = values[9];  // not NaN
    totals.stop = totals.stop || values[1] != 0;
    totals.data_seconds = std::max(totals.data_seconds, values[2]);
    totals.memory_gib.push_back(values[3]);
    totals.cpu_seconds.push_back(values[4]);
    totals.comm_seconds.push_back(values[5]);
    totals.exposed_seconds.push_back(values[6]);
    totals.wall_seconds.push_back(values[7]);
    totals.save_ended = totals.save_ended && values[8] != 0;
  }
  totals.label_count = std::llround(labels);
  return totals;
}

}  // namespace phalanx::train
