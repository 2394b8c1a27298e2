// Batches of MNIST, and one epoch of them over all ranks.
#pragma once

#include <ATen/ops/nll_loss.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <string>

#include "phalanx/launch/process_context.h"
#include "phalanx/models/image_batch.h"

struct MnistBatches {
  std::string data = "synthetic";              // or a folder with the IDX files
  std::int64_t batch = 64, test_batch = 1000;  // over all ranks
  std::int64_t images = 0;  // the first of the training set, and a sixth as many of the test set; 0: all
  std::uint64_t seed = 1;
};

/// Training batches are shuffled. The last batch of an epoch has the rows that are left: none is dropped.
inline phalanx::models::ImageLoader mnist_loader(const MnistBatches& batches, const phalanx::ProcessContext& context,
                                                 phalanx::data::ImageSplit split) {
  const bool train = split == phalanx::data::ImageSplit::train;
  const std::int64_t count = train || batches.images == 0 ? batches.images : batches.images / 6 + 1;
  return {{.global_batch = train ? batches.batch : batches.test_batch / context.world_size * context.world_size,
           .rank = context.rank,
           .ranks = context.world_size,
           .seed = batches.seed,
           .shuffle = train,
           .drop_last = false,
           .mean = 0.1307,
           .deviation = 0.3081,
           .device = context.device},
          phalanx::data::load_images(batches.data, phalanx::data::ImageKind::mnist, split, count)};
}

/// Sums of loss, right answers and images over one epoch of all ranks' rows. step(i, batch) returns the scores of this
/// rank's rows of batch i.
template <class Step>
std::array<double, 3> epoch_of(const phalanx::models::ImageLoader& images, const phalanx::ProcessContext& context,
                               std::int64_t epoch, const Step& step) {
  at::Tensor totals = at::zeros({3}, at::TensorOptions(at::kDouble).device(context.device));
  for (std::int64_t i = 0; i < images.steps_per_epoch(); ++i) {
    const phalanx::models::ImageBatch batch = images.batch(epoch, i);
    const at::Tensor scores = step(i, batch);
    totals[0] += at::nll_loss(scores, batch.labels, {}, at::Reduction::Sum);
    totals[1] += scores.argmax(1).eq(batch.labels).sum();
    totals[2] += batch.labels.size(0);
  }
  context.world->all_reduce(totals);
  return {totals[0].item<double>(), totals[1].item<double>(), totals[2].item<double>()};
}
