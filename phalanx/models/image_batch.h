// ImageLoader: batches of images as tensors. Bytes become floats, normalised as (byte / 255 - mean) / deviation in
// every channel.
//
//   ImageLoader train(
//       {.global_batch = 64, .rank = rank, .ranks = ranks, .seed = 1, .mean = 0.1307, .deviation = 0.3081},
//       data::load_images("synthetic", data::ImageKind::mnist, data::ImageSplit::train));
//   for (std::int64_t step = 0; step < train.steps_per_epoch(); ++step) {
//     const auto [images, labels, first_row] = train.batch(epoch, step);
//     ...
//   }
//
// A batch is a function of (seed, epoch, step): each epoch shows every image once, shuffled or in order. Each rank gets
// its rows of the batch. Together the ranks have the global batch, whatever their number. If too few images are left
// for the last step of an epoch, `drop_last` drops them, and then all ranks always have equal shares. Otherwise the
// last batch is smaller, and some ranks' part may be empty. Then the mean over the batch is not the mean of the ranks'
// means: sum the losses of a rank's rows and divide by rows(step).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "phalanx/data/image_set.h"

namespace phalanx::models {

struct ImageLoaderOptions {
  std::int64_t global_batch = 64;
  int rank = 0;
  int ranks = 1;
  std::uint64_t seed = 0;
  bool shuffle = true;
  bool drop_last = true;
  double mean = 0.5;
  double deviation = 0.5;
  at::Device device = at::kCPU;
};

struct ImageBatch {
  at::Tensor images;           // float32 [rows, channels, height, width]
  at::Tensor labels;           // int64 [rows]
  std::int64_t first_row = 0;  // position of the first of these rows in the global batch
};

class ImageLoader {
 public:
  /// Throws ConfigError if the batch is larger than the set (with drop_last) or the number of ranks does not divide it.
  ImageLoader(const ImageLoaderOptions& options, data::ImageSet set);

  std::int64_t steps_per_epoch() const noexcept;
  /// Of that step's batch, over all ranks: global_batch, or what is left for the last step of an epoch.
  std::int64_t rows(std::int64_t step) const noexcept;
  ImageBatch batch(std::int64_t epoch, std::int64_t step) const;
  const data::ImageSet& set() const noexcept { return set_; }

 private:
  ImageLoaderOptions options_;
  data::ImageSet set_;
};

}  // namespace phalanx::models
