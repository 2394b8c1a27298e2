// Reads MNIST's IDX files and CIFAR-10's binary files; see image_set.h.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>

#include "phalanx/base/error.h"
#include "phalanx/data/gzip_reader.h"
#include "phalanx/data/image_set.h"

namespace phalanx::data {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMnistSide = 28, kCifarSide = 32, kCifarRecord = 1 + 3 * kCifarSide * kCifarSide;
constexpr int kClasses = 10;

std::optional<fs::path> plain_or_compressed(const fs::path& path) {
  for (const auto& candidate : {path, fs::path(path.string() + ".gz")}) {
    std::error_code ignored;
    if (fs::is_regular_file(candidate, ignored)) return candidate;
  }
  return std::nullopt;
}

// The folder that an archive or torchvision makes in the one that the user names, if it is there.
fs::path inner_folder(const fs::path& folder, const char* inner) {
  std::error_code ignored;
  return fs::is_directory(folder / inner, ignored) ? folder / inner : folder;
}

// What to do about files of CIFAR-10 that are there, but not as they are read.
std::string hint_for_cifar10(const fs::path& folder) {
  std::error_code ignored;
  if (fs::exists(folder / "cifar-10-binary.tar.gz", ignored)) return "; unpack cifar-10-binary.tar.gz there (tar -xf)";
  if (fs::exists(folder / "cifar-10-batches-py", ignored) || fs::exists(folder / "cifar-10-python.tar.gz", ignored)) {
    return "; the Python version is there, and the binary version is needed (cifar-10-binary.tar.gz)";
  }
  return "";
}

// Finds the file of each name. A name may have several spellings. `hint` ends the error message.
std::vector<fs::path> find_files(const fs::path& folder, const std::string& what,
                                 const std::vector<std::vector<std::string>>& names, const std::string& hint = "") {
  std::vector<fs::path> found;
  std::vector<std::string> absent;
  for (const auto& spellings : names) {
    const std::size_t before = found.size();
    for (const auto& name : spellings) {
      const auto file = plain_or_compressed(folder / name);
      if (file && found.size() == before) found.push_back(*file);
    }
    if (found.size() == before) absent.push_back(spellings.front());
  }
  if (absent.empty()) return found;
  std::error_code ignored;
  const char* why = fs::is_directory(folder, ignored) ? "" : ", which is not a folder";
  throw DataError(fmt::format(
      "{} is not complete in '{}'{}: missing {} (plain or as .gz): put the files there, or take synthetic images{}",
      what, folder.string(), why, fmt::join(absent, ", "), hint));
}

std::int64_t big_endian(const std::uint8_t* bytes) {
  return std::int64_t{bytes[0]} << 24 | std::int64_t{bytes[1]} << 16 | std::int64_t{bytes[2]} << 8 | bytes[3];
}

struct Idx {
  std::vector<std::int64_t> shape;
  std::vector<std::uint8_t> bytes;
};

// IDX: two zero bytes, the type of an element (8: unsigned byte), the number of dimensions, each dimension as a
// big-endian 32-bit number, the elements. `expected` has -1 for a dimension of any size.
Idx read_idx(const fs::path& path, const std::vector<std::int64_t>& expected) {
  const std::size_t dimensions = expected.size(), header_bytes = 4 + 4 * dimensions;
  GzipReader in(path);
  const auto header = in.read(header_bytes);
  const std::array<std::uint8_t, 4> magic{0, 0, 8, static_cast<std::uint8_t>(dimensions)};
  if (header.size() >= magic.size() && !std::equal(magic.begin(), magic.end(), header.begin())) {
    throw DataError(fmt::format("{} begins with {:02x}: expected {:02x}, an IDX file of bytes in {} dimension{}",
                                path.string(), fmt::join(header.begin(), header.begin() + 4, " "),
                                fmt::join(magic, " "), dimensions, dimensions == 1 ? "" : "s"));
  }
  if (header.size() < header_bytes) {
    throw DataError(fmt::format("{} has {} bytes: expected an IDX file, whose header alone has {}", path.string(),
                                header.size(), header_bytes));
  }
  Idx idx;
  std::int64_t count = 1;
  for (std::size_t i = 0; i < dimensions; ++i) {
    idx.shape.push_back(big_endian(header.data() + 4 + 4 * i));
    if (expected[i] >= 0 && idx.shape[i] != expected[i]) {
      throw DataError(
          fmt::format("{} says that dimension {} is {}: expected {}", path.string(), i, idx.shape[i], expected[i]));
    }
    count *= idx.shape.back();  // at most 2^32 times the image size, because all other dimensions are the expected ones
  }
  idx.bytes = in.read(static_cast<std::size_t>(count));
  if (static_cast<std::int64_t>(idx.bytes.size()) < count || !in.read(1).empty()) {
    throw DataError(
        fmt::format("{} holds {} bytes behind its header: expected {}, by the header's shape [{}]", path.string(),
                    static_cast<std::int64_t>(idx.bytes.size()) < count ? std::to_string(idx.bytes.size())
                                                                        : fmt::format("more than {}", count),
                    count, fmt::join(idx.shape, ", ")));
  }
  if (count == 0) throw DataError(fmt::format("{} holds no images: expected one at least", path.string()));
  return idx;
}

void check_labels(const fs::path& path, const std::vector<std::uint8_t>& labels) {
  const auto wrong = std::ranges::find_if(labels, [](int label) { return label >= kClasses; });
  if (wrong == labels.end()) return;
  throw DataError(fmt::format("{}: the label of image {} is {}: expected 0 to {}", path.string(),
                              wrong - labels.begin(), int{*wrong}, kClasses - 1));
}

}  // namespace

ImageSet read_mnist(const fs::path& folder, ImageSplit split) {
  const std::string prefix = split == ImageSplit::train ? "train" : "t10k";
  const auto files = find_files(inner_folder(folder, "MNIST/raw"), "MNIST",
                                {{prefix + "-images-idx3-ubyte", prefix + "-images.idx3-ubyte"},
                                 {prefix + "-labels-idx1-ubyte", prefix + "-labels.idx1-ubyte"}});
  Idx images = read_idx(files[0], {-1, kMnistSide, kMnistSide});
  Idx labels = read_idx(files[1], {-1});
  if (images.shape[0] != labels.shape[0]) {
    throw DataError(fmt::format("{} holds {} images and {} has {} labels: expected as many", files[0].string(),
                                images.shape[0], files[1].string(), labels.shape[0]));
  }
  check_labels(files[1], labels.bytes);
  return {1, kMnistSide, kMnistSide, std::move(images.bytes), std::move(labels.bytes)};
}

ImageSet read_cifar10(const fs::path& folder, ImageSplit split) {
  std::vector<std::vector<std::string>> names;
  if (split == ImageSplit::test) names = {{"test_batch.bin"}};
  for (int i = 1; i <= 5 && split == ImageSplit::train; ++i) names.push_back({fmt::format("data_batch_{}.bin", i)});

  ImageSet set{3, kCifarSide, kCifarSide, {}, {}};
  for (const auto& path :
       find_files(inner_folder(folder, "cifar-10-batches-bin"), "CIFAR-10", names, hint_for_cifar10(folder))) {
    GzipReader in(path);
    std::vector<std::uint8_t> labels;
    while (true) {
      const auto record = in.read(kCifarRecord);
      if (record.empty()) break;
      if (static_cast<std::int64_t>(record.size()) < kCifarRecord) {
        throw DataError(fmt::format(
            "{} ends with {} bytes behind image {}: expected images of {} bytes each (the binary version of CIFAR-10)",
            path.string(), record.size(), labels.size(), kCifarRecord));
      }
      labels.push_back(record[0]);
      set.pixels.insert(set.pixels.end(), record.begin() + 1, record.end());
    }
    if (labels.empty()) throw DataError(fmt::format("{} holds no images: expected one at least", path.string()));
    check_labels(path, labels);
    set.labels.insert(set.labels.end(), labels.begin(), labels.end());
  }
  return set;
}

ImageSet load_images(const std::string& source, ImageKind kind, ImageSplit split, std::int64_t count) {
  if (source == "synthetic") return synthetic_images({.like = kind, .count = count}, split);
  ImageSet set = kind == ImageKind::mnist ? read_mnist(source, split) : read_cifar10(source, split);
  if (count > 0 && count < set.size()) {
    set.labels.resize(static_cast<std::size_t>(count));
    set.pixels.resize(static_cast<std::size_t>(count * set.image_bytes()));
  }
  return set;
}

}  // namespace phalanx::data
