#include "phalanx/models/image_batch.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/data/permutation.h"

namespace phalanx::models {

ImageLoader::ImageLoader(const ImageLoaderOptions& options, data::ImageSet set)
    : options_(options), set_(std::move(set)) {
  if (options_.ranks <= 0 || options_.global_batch <= 0 || options_.global_batch % options_.ranks != 0) {
    const std::int64_t ranks = std::max(options_.ranks, 1);
    throw ConfigError(fmt::format(
        "a batch of {} images over {} ranks: expected a multiple of the number of ranks, such as {}",
        options_.global_batch, options_.ranks, std::max<std::int64_t>(1, options_.global_batch / ranks) * ranks));
  }
  if (options_.drop_last && options_.global_batch > set_.size()) {
    throw ConfigError(fmt::format("a batch of {} images of {} that there are: expected {} at most",
                                  options_.global_batch, set_.size(), set_.size()));
  }
}

std::int64_t ImageLoader::steps_per_epoch() const noexcept {
  const std::int64_t batch = options_.global_batch;
  return options_.drop_last ? set_.size() / batch : (set_.size() + batch - 1) / batch;
}

std::int64_t ImageLoader::rows(std::int64_t step) const noexcept {
  return std::min(options_.global_batch, set_.size() - step * options_.global_batch);
}

ImageBatch ImageLoader::batch(std::int64_t epoch, std::int64_t step) const {
  const std::int64_t share = options_.global_batch / options_.ranks, first_row = options_.rank * share;
  const std::int64_t begin = std::min(step * options_.global_batch + first_row, set_.size());
  const std::int64_t rows = std::min(share, set_.size() - begin);
  const data::Permutation order(set_.size(), {options_.seed, static_cast<std::uint64_t>(epoch)});

  std::array<float, 256> value{};
  for (int i = 0; i < 256; ++i) {
    value[static_cast<std::size_t>(i)] = static_cast<float>((i / 255.0 - options_.mean) / options_.deviation);
  }
  ImageBatch batch{at::empty({rows, set_.channels, set_.height, set_.width}, at::TensorOptions(at::kFloat)),
                   at::empty({rows}, at::TensorOptions(at::kLong)), first_row};
  auto* out = batch.images.mutable_data_ptr<float>();
  auto* labels = batch.labels.mutable_data_ptr<std::int64_t>();
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t index = options_.shuffle ? order(begin + row) : begin + row;
    out = std::ranges::transform(set_.image(index), out, [&](std::uint8_t byte) { return value[byte]; }).out;
    labels[row] = set_.labels[static_cast<std::size_t>(index)];
  }
  batch.images = batch.images.to(options_.device);
  batch.labels = batch.labels.to(options_.device);
  return batch;
}

}  // namespace phalanx::models
