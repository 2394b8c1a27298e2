// Labelled images: MNIST and CIFAR-10 in their published file formats, and synthetic look-alikes that need no files.
//
//   ImageSet train = read_mnist("data/mnist", ImageSplit::train);      // 60,000 of 1 x 28 x 28
//   ImageSet test = read_cifar10("data/cifar", ImageSplit::test);      // 10,000 of 3 x 32 x 32
//   ImageSet any = synthetic_images({.like = ImageKind::mnist, .count = 2000, .seed = 1}, ImageSplit::train);
//
// Each file may be plain or compressed with the suffix .gz:
//   MNIST     train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte
//             (also with a dot before idx, as some archives name them); in the folder itself or in MNIST/raw, which
//             torchvision makes
//   CIFAR-10  the binary version: data_batch_1.bin to data_batch_5.bin, test_batch.bin; in the folder itself or in
//             cifar-10-batches-bin, which its archive creates
// Files may hold fewer images than the originals, but no other shapes. Absent files are one DataError that lists them
// all. A wrong magic number, a size that does not fit the header or the record, a label out of range and damaged
// compression are DataErrors that name the file, what was expected and what was found. No size in a header is trusted
// before the bytes are there.
//
// This header does not use torch; models/image_batch.h makes batches.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace phalanx::data {

struct ImageSet {
  std::int64_t channels = 0, height = 0, width = 0;
  std::vector<std::uint8_t> pixels;  // [size, channels, height, width]
  std::vector<std::uint8_t> labels;  // [size], each below 10

  std::int64_t size() const { return static_cast<std::int64_t>(labels.size()); }
  std::int64_t image_bytes() const { return channels * height * width; }
  std::span<const std::uint8_t> image(std::int64_t index) const {
    return std::span(pixels).subspan(static_cast<std::size_t>(index * image_bytes()),
                                     static_cast<std::size_t>(image_bytes()));
  }
};

enum class ImageSplit { train, test };
enum class ImageKind { mnist, cifar10 };

ImageSet read_mnist(const std::filesystem::path& folder, ImageSplit split);
ImageSet read_cifar10(const std::filesystem::path& folder, ImageSplit split);

/// Ten balanced classes. Each has its own pattern, which an image shows shifted, brighter or darker, under noise. An
/// image is a pure function of (seed, split, index). A small net learns the classes in a few hundred steps. The
/// patterns depend only on the seed: train and test sets of one seed belong together.
struct SyntheticImages {
  ImageKind like = ImageKind::mnist;
  std::int64_t count = 0;  // 0: as many as the original has
  std::uint64_t seed = 0;
};
ImageSet synthetic_images(const SyntheticImages& options, ImageSplit split);

/// The source of a recipe's --data: "synthetic", or a folder to read from. `count` limits the images to the first ones
/// of a file; 0: all of them.
ImageSet load_images(const std::string& source, ImageKind kind, ImageSplit split, std::int64_t count = 0);

}  // namespace phalanx::data
