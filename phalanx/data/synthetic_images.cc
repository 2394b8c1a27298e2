// Synthetic images that look like MNIST's and CIFAR-10's to a net; see image_set.h.
#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "phalanx/base/philox.h"
#include "phalanx/data/image_set.h"

namespace phalanx::data {
namespace {

constexpr int kPatterns = 10, kWaves = 4, kShift = 2;

// A sum of slow waves, different for each class and channel, between 0 and 1. It is larger than an image, for the
// shifts.
std::vector<float> pattern(const ImageSet& shape, std::uint64_t seed, std::uint64_t cls) {
  const std::int64_t height = shape.height + 2 * kShift, width = shape.width + 2 * kShift;
  std::vector<float> values;
  for (std::int64_t c = 0; c < shape.channels; ++c) {
    PhiloxStream draw(seed, cls * 4 + static_cast<std::uint64_t>(c));
    struct Wave {
      double x, y, phase;
    };
    std::array<Wave, kWaves> waves{};
    for (auto& wave : waves) {
      const double angle = draw.uniform() * std::numbers::pi, cycles = 1.0 + 2.0 * draw.uniform();
      const double k = 2 * std::numbers::pi * cycles / static_cast<double>(shape.width);
      wave = {k * std::cos(angle), k * std::sin(angle), draw.uniform() * 2 * std::numbers::pi};
    }
    for (std::int64_t y = 0; y < height; ++y) {
      for (std::int64_t x = 0; x < width; ++x) {
        double sum = 0;
        for (const auto& wave : waves) sum += std::sin(wave.x * double(x) + wave.y * double(y) + wave.phase);
        values.push_back(static_cast<float>(0.5 + sum / (2 * kWaves)));
      }
    }
  }
  return values;
}

}  // namespace

ImageSet synthetic_images(const SyntheticImages& options, ImageSplit split) {
  const bool mnist = options.like == ImageKind::mnist, train = split == ImageSplit::train;
  ImageSet set = mnist ? ImageSet{1, 28, 28, {}, {}} : ImageSet{3, 32, 32, {}, {}};
  const std::int64_t count = options.count > 0 ? options.count : !train ? 10'000 : mnist ? 60'000 : 50'000;
  std::vector<std::vector<float>> patterns;
  for (std::uint64_t cls = 0; cls < kPatterns; ++cls) patterns.push_back(pattern(set, options.seed, cls));

  const std::int64_t rows = set.height + 2 * kShift, columns = set.width + 2 * kShift;
  set.pixels.resize(static_cast<std::size_t>(count * set.image_bytes()));
  std::uint8_t* out = set.pixels.data();
  for (std::int64_t i = 0; i < count; ++i) {
    // The random streams of images come after those of the patterns; each split has its own half.
    PhiloxStream draw(options.seed, (train ? 1ULL : 2ULL) << 40 | static_cast<std::uint64_t>(i));
    const auto label = static_cast<std::uint8_t>(i % kPatterns);
    const auto down = static_cast<std::int64_t>(draw.below(2 * kShift + 1));
    const auto right = static_cast<std::int64_t>(draw.below(2 * kShift + 1));
    const float contrast = 0.5F + 0.5F * static_cast<float>(draw.uniform());
    const float brightness = (1.0F - contrast) * static_cast<float>(draw.uniform());
    const auto& shown = patterns[label];
    std::uint32_t noise = 0;
    int left = 0;
    for (std::int64_t c = 0; c < set.channels; ++c) {
      for (std::int64_t y = 0; y < set.height; ++y) {
        const float* from = shown.data() + (c * rows + y + down) * columns + right;
        for (std::int64_t x = 0; x < set.width; ++x) {
          if (left-- == 0) noise = draw.next_u32(), left = 3;
          const float grain = static_cast<float>(noise & 0xFF) * (0.4F / 255) - 0.2F;
          noise >>= 8;
          *out++ = static_cast<std::uint8_t>(std::clamp(brightness + contrast * from[x] + grain, 0.0F, 1.0F) * 255);
        }
      }
    }
    set.labels.push_back(label);
  }
  return set;
}

}  // namespace phalanx::data
