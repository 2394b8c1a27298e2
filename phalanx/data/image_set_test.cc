#include "phalanx/data/image_set.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <array>
#include <cmath>
#include <functional>
#include <string>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx::data {
namespace {

using ::testing::Le;

std::string gzipped(const std::string& bytes) {
  TempDirectory folder;
  const auto path = folder.path() / "a.gz";
  gzFile file = gzopen(path.c_str(), "wb");
  gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size()));
  gzclose(file);
  return read_file(path);
}

std::string big_endian_text(std::uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16), static_cast<char>(value >> 8),
          static_cast<char>(value)};
}

// Image i has the pixels (i + 3 j) mod 251, and label 9 - i mod 10.
std::string pixels(int image, int count) {
  std::string bytes;
  for (int j = 0; j < count; ++j) bytes += static_cast<char>((image + 3 * j) % 251);
  return bytes;
}
std::string idx_images(int count) {
  std::string bytes{0, 0, 8, 3};
  bytes += big_endian_text(static_cast<std::uint32_t>(count)) + big_endian_text(28) + big_endian_text(28);
  for (int i = 0; i < count; ++i) bytes += pixels(i, 28 * 28);
  return bytes;
}
std::string idx_labels(int count) {
  std::string bytes{0, 0, 8, 1};
  bytes += big_endian_text(static_cast<std::uint32_t>(count));
  for (int i = 0; i < count; ++i) bytes += static_cast<char>(9 - i % 10);
  return bytes;
}
std::string cifar_batch(int first, int count) {
  std::string bytes;
  for (int i = first; i < first + count; ++i) bytes += static_cast<char>(9 - i % 10) + pixels(i, 3072);
  return bytes;
}

std::string data_error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const DataError& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected a DataError";
  return "";
}

struct ImageSetTest : ::testing::Test {
  std::filesystem::path folder() const { return temporary.path(); }
  void put_mnist(const std::string& images, const std::string& labels) const {
    write_file(folder() / "train-images-idx3-ubyte", images);
    write_file(folder() / "train-labels-idx1-ubyte", labels);
  }
  std::string mnist_error(const std::string& images, const std::string& labels) const {
    put_mnist(images, labels);
    return data_error_of([&] { read_mnist(folder(), ImageSplit::train); });
  }
  TempDirectory temporary;
};

TEST_F(ImageSetTest, ReadsMnistPlainAndCompressed) {
  put_mnist(idx_images(4), idx_labels(4));
  write_file(folder() / "t10k-images-idx3-ubyte.gz", gzipped(idx_images(3)));
  write_file(folder() / "t10k-labels.idx1-ubyte.gz", gzipped(idx_labels(3)));
  const ImageSet train = read_mnist(folder(), ImageSplit::train), test = read_mnist(folder(), ImageSplit::test);
  EXPECT_EQ(train.size(), 4);
  EXPECT_EQ(train.image_bytes(), 28 * 28);
  EXPECT_THAT(train.labels, ElementsAre(9, 8, 7, 6));
  EXPECT_EQ(train.image(2)[5], 2 + 15);
  EXPECT_THAT(test.labels, ElementsAre(9, 8, 7));
  EXPECT_TRUE(std::ranges::equal(test.image(2), train.image(2)));
}

TEST_F(ImageSetTest, ReadsCifarFromItsArchivesFolderToo) {
  const auto inner = folder() / "cifar-10-batches-bin";
  std::filesystem::create_directory(inner);
  for (int i = 1; i <= 5; ++i) {
    const std::string name = "data_batch_" + std::to_string(i) + ".bin";
    i == 3 ? write_file(inner / (name + ".gz"), gzipped(cifar_batch(2, 1)))
           : write_file(inner / name, cifar_batch(i - 1, 1));
  }
  write_file(folder() / "test_batch.bin", cifar_batch(1, 2));
  const ImageSet train = read_cifar10(folder(), ImageSplit::train);
  EXPECT_THAT(train.labels, ElementsAre(9, 8, 7, 6, 5));
  EXPECT_EQ(train.image(3)[3071], (3 + 3 * 3071) % 251);
  EXPECT_THAT(data_error_of([&] { read_cifar10(folder(), ImageSplit::test); }), HasSubstr("missing test_batch.bin"));
  std::filesystem::rename(folder() / "test_batch.bin", inner / "test_batch.bin");
  EXPECT_THAT(read_cifar10(folder(), ImageSplit::test).labels, ElementsAre(8, 7));
  EXPECT_EQ(load_images(folder(), ImageKind::cifar10, ImageSplit::train, 2).pixels.size(), 2U * 3072);
}

// The archives as they are published: their names, compression, formats and numbers of images.
TEST_F(ImageSetTest, ReadsMnistAsPublished) {
  const std::string images = idx_images(60'000), tests = idx_images(10'000);
  EXPECT_EQ(images.size(), 47'040'016U);
  EXPECT_EQ(tests.size(), 7'840'016U);
  EXPECT_EQ(idx_labels(60'000).size(), 60'008U);
  const auto raw = folder() / "MNIST" / "raw";  // as torchvision leaves them
  std::filesystem::create_directories(raw);
  write_file(raw / "train-images-idx3-ubyte.gz", gzipped(images));
  write_file(raw / "train-labels-idx1-ubyte.gz", gzipped(idx_labels(60'000)));
  write_file(raw / "t10k-images-idx3-ubyte", tests);
  write_file(raw / "t10k-labels-idx1-ubyte", idx_labels(10'000));
  const ImageSet train = read_mnist(folder(), ImageSplit::train), test = read_mnist(raw, ImageSplit::test);
  EXPECT_EQ(train.size(), 60'000);
  EXPECT_EQ(test.size(), 10'000);
  EXPECT_EQ(train.image(59'999)[783], (59'999 + 3 * 783) % 251);
  EXPECT_EQ(train.labels[59'999], 0);
  EXPECT_EQ(test.image(9'999)[783], (9'999 + 3 * 783) % 251);
}

TEST_F(ImageSetTest, ReadsCifarAsPublished) {
  const auto inner = folder() / "cifar-10-batches-bin";
  std::filesystem::create_directory(inner);
  for (int i = 0; i < 6; ++i) {
    const std::string batch = cifar_batch(10'000 * i, 10'000);
    EXPECT_EQ(batch.size(), 30'730'000U);
    write_file(inner / (i == 5 ? "test_batch.bin" : "data_batch_" + std::to_string(i + 1) + ".bin"), batch);
  }
  const ImageSet train = read_cifar10(folder(), ImageSplit::train), test = read_cifar10(folder(), ImageSplit::test);
  EXPECT_EQ(train.size(), 50'000);
  EXPECT_EQ(test.size(), 10'000);
  EXPECT_EQ(train.image(49'999)[3071], (49'999 + 3 * 3071) % 251);
  EXPECT_EQ(train.labels[49'998], 1);
  EXPECT_EQ(test.image(0)[0], 50'000 % 251);
}

TEST_F(ImageSetTest, SaysWhatToDoWithOtherArchivesOfCifar) {
  const auto error = [&] { return data_error_of([&] { read_cifar10(folder(), ImageSplit::train); }); };
  EXPECT_THAT(error(), Not(HasSubstr("tar")));
  std::filesystem::create_directory(folder() / "cifar-10-batches-py");
  EXPECT_THAT(error(), HasSubstr("the Python version is there, and the binary version is needed"));
  write_file(folder() / "cifar-10-binary.tar.gz", "");
  EXPECT_THAT(error(), AllOf(HasSubstr("missing data_batch_1.bin"), HasSubstr("unpack cifar-10-binary.tar.gz there")));
}

TEST_F(ImageSetTest, AbsentFilesAreAllNamed) {
  EXPECT_EQ(data_error_of([&] { read_mnist(folder(), ImageSplit::train); }),
            "MNIST is not complete in '" + folder().string() +
                "': missing train-images-idx3-ubyte, train-labels-idx1-ubyte (plain or as .gz): put the files there, "
                "or take synthetic images");
  write_file(folder() / "t10k-images-idx3-ubyte", idx_images(1));
  EXPECT_THAT(data_error_of([&] { read_mnist(folder(), ImageSplit::test); }),
              AllOf(HasSubstr("missing t10k-labels-idx1-ubyte"), Not(HasSubstr("images-idx3"))));
  write_file(folder() / "data_batch_2.bin", cifar_batch(0, 1));
  EXPECT_THAT(data_error_of([&] { read_cifar10(folder(), ImageSplit::train); }),
              HasSubstr("missing data_batch_1.bin, data_batch_3.bin, data_batch_4.bin, data_batch_5.bin"));
  EXPECT_THAT(data_error_of([&] { load_images("no/such", ImageKind::mnist, ImageSplit::test); }),
              HasSubstr("'no/such', which is not a folder"));
}

TEST_F(ImageSetTest, DamagedIdxFilesAreNamedWithWhatWasExpected) {
  std::string images = idx_images(2);
  const std::string labels = idx_labels(2);
  EXPECT_THAT(mnist_error(labels, labels),
              HasSubstr("train-images-idx3-ubyte begins with 00 00 08 01: expected 00 00 08 03"));
  EXPECT_THAT(mnist_error(images, images), HasSubstr("expected 00 00 08 01, an IDX file of bytes in 1 dimension"));
  EXPECT_THAT(mnist_error("", labels), HasSubstr("has 0 bytes: expected an IDX file, whose header alone has 16"));
  EXPECT_THAT(mnist_error(images.substr(0, 12), labels), HasSubstr("has 12 bytes"));
  EXPECT_THAT(mnist_error(images.substr(0, images.size() - 1), labels),
              HasSubstr("holds 1567 bytes behind its header: expected 1568, by the header's shape [2, 28, 28]"));
  EXPECT_THAT(mnist_error(images + "x", labels), HasSubstr("holds more than 1568 bytes behind its header"));
  EXPECT_THAT(mnist_error(idx_images(3), labels), AllOf(HasSubstr("3 images"), HasSubstr("has 2 labels")));
  EXPECT_THAT(mnist_error(idx_images(0), idx_labels(0)), HasSubstr("holds no images"));
  EXPECT_THAT(mnist_error(images, labels.substr(0, 9) + '\x0a'),
              HasSubstr("train-labels-idx1-ubyte: the label of image 1 is 10: expected 0 to 9"));
  images[11] = 27;
  EXPECT_THAT(mnist_error(images, labels), HasSubstr("says that dimension 1 is 27: expected 28"));
  // A header that claims three terabytes: nothing of that size is asked for.
  images = idx_images(2);
  for (int i = 4; i < 8; ++i) images[static_cast<std::size_t>(i)] = '\xff';
  EXPECT_THAT(mnist_error(images, labels), HasSubstr("holds 1568 bytes behind its header: expected 3367254359280"));
}

TEST_F(ImageSetTest, DamagedCifarFilesAndCompression) {
  const auto path = folder() / "test_batch.bin";
  const auto error = [&] { return data_error_of([&] { read_cifar10(folder(), ImageSplit::test); }); };
  write_file(path, cifar_batch(0, 2).substr(0, 3073 + 10));
  EXPECT_THAT(error(), HasSubstr("ends with 10 bytes behind image 1: expected images of 3073 bytes"));
  write_file(path, "");
  EXPECT_THAT(error(), HasSubstr("holds no images"));
  write_file(path, '\x63' + pixels(0, 3072));
  EXPECT_THAT(error(), HasSubstr("the label of image 0 is 99"));
  std::filesystem::remove(path);
  const std::string good = gzipped(cifar_batch(0, 5));
  const auto compressed = folder() / "test_batch.bin.gz";
  write_file(compressed, good.substr(0, good.size() / 2));
  EXPECT_THAT(error(), AllOf(HasSubstr("test_batch.bin.gz is damaged"), HasSubstr("ends too soon")));
  std::string flipped = good;
  flipped[good.size() - 6] ^= 1;  // of the checksum at the end
  write_file(compressed, flipped);
  EXPECT_THAT(error(), AllOf(HasSubstr("test_batch.bin.gz is damaged"), HasSubstr("is not valid")));
}

// How often the mean image of a class that `train` has is the nearest one, contrast and brightness taken off.
double nearest_mean_accuracy(const ImageSet& train, const ImageSet& test) {
  const auto bytes = static_cast<std::size_t>(train.image_bytes());
  const auto normal = [&](auto&& image) {
    std::vector<double> values(image.begin(), image.end());
    double mean = 0, square = 0;
    for (const double v : values) mean += v / static_cast<double>(bytes);
    for (double& v : values) v -= mean, square += v * v;
    for (double& v : values) v /= std::sqrt(square);
    return values;
  };
  std::vector<std::vector<double>> means(10, std::vector<double>(bytes));
  for (std::int64_t i = 0; i < train.size(); ++i) {
    const auto image = normal(train.image(i));
    for (std::size_t j = 0; j < bytes; ++j) means[train.labels[static_cast<std::size_t>(i)]][j] += image[j];
  }
  for (auto& mean : means) mean = normal(mean);
  int right = 0;
  for (std::int64_t i = 0; i < test.size(); ++i) {
    const auto image = normal(test.image(i));
    std::vector<double> alike(10);
    for (std::size_t c = 0; c < 10; ++c)
      for (std::size_t j = 0; j < bytes; ++j) alike[c] += image[j] * means[c][j];
    right += std::ranges::max_element(alike) - alike.begin() == test.labels[static_cast<std::size_t>(i)];
  }
  return right / static_cast<double>(test.size());
}

TEST(SyntheticImagesTest, ArePureFunctionsOfSeedSplitAndIndexAndCanBeLearned) {
  for (const auto kind : {ImageKind::mnist, ImageKind::cifar10}) {
    const ImageSet train = synthetic_images({.like = kind, .count = 300, .seed = 5}, ImageSplit::train);
    const ImageSet test = synthetic_images({.like = kind, .count = 100, .seed = 5}, ImageSplit::test);
    EXPECT_EQ(train.channels, kind == ImageKind::mnist ? 1 : 3);
    EXPECT_EQ(train.width, kind == ImageKind::mnist ? 28 : 32);
    EXPECT_EQ(static_cast<std::int64_t>(train.pixels.size()), 300 * train.image_bytes());
    EXPECT_THAT(train.labels, Each(Le(9)));
    for (int c = 0; c < 10; ++c) EXPECT_EQ(std::ranges::count(train.labels, c), 30);

    const ImageSet fewer = synthetic_images({.like = kind, .count = 7, .seed = 5}, ImageSplit::train);
    EXPECT_TRUE(std::ranges::equal(fewer.image(6), train.image(6)));
    EXPECT_FALSE(std::ranges::equal(test.image(6), train.image(6)));
    const ImageSet other = synthetic_images({.like = kind, .count = 100, .seed = 6}, ImageSplit::test);
    // A plain linear classifier finds at least this; chance is 0.1.
    EXPECT_GT(nearest_mean_accuracy(train, test), 0.6);
    EXPECT_LT(nearest_mean_accuracy(train, other), 0.4) << "patterns belong to the seed";
  }
  EXPECT_EQ(load_images("synthetic", ImageKind::mnist, ImageSplit::test).size(), 10'000);
}

}  // namespace
}  // namespace phalanx::data
