// MNIST's IDX files and CIFAR-10's, plain or compressed. Byte 0 of the input: which of them; for MNIST the length of
// the labels' file in the next two bytes.
#include <algorithm>

#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/data/image_set.h"
#include "tests/fuzz/fuzz.h"

using namespace phalanx;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const TempDirectory scratch("fuzz");
  if (size < 3) return 0;
  const bool mnist = (data[0] & 1) == 0;
  const std::string suffix = (data[0] & 2) != 0 ? ".gz" : "";  // a file that is not compressed may bear it, too
  const auto folder = scratch.path() / (mnist ? "mnist" : "cifar" + suffix);
  const std::string_view rest = fuzz::text_of(data, size).substr(3);
  std::filesystem::create_directories(folder);
  if (mnist) {
    const std::size_t labels = std::min<std::size_t>(data[1] | data[2] << 8, rest.size());
    write_file(folder / "t10k-labels-idx1-ubyte", rest.substr(0, labels));
    write_file(folder / "t10k-images-idx3-ubyte", rest.substr(labels));
  } else {
    write_file(folder / ("test_batch.bin" + suffix), rest);
  }
  return fuzz::parse(
      [&] {
        const auto set = mnist ? data::read_mnist(folder, data::ImageSplit::test)
                               : data::read_cifar10(folder, data::ImageSplit::test);
        fuzz::require(static_cast<std::int64_t>(set.pixels.size()) == set.size() * set.image_bytes() && set.size() > 0,
                      "every image has its pixels");
      },
      folder.string());
}
