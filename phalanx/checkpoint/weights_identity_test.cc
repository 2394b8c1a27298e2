#include "phalanx/checkpoint/files/weights_identity.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/checkpoint/files/safetensors.h"
#include "phalanx/checkpoint/testing/test_state.h"

namespace phalanx {
namespace {

/// One matrix of `bytes` zero bytes, a sparse file where they are many; byte `flipped` is 1.
void write_weights(const std::filesystem::path& path, std::int64_t bytes, std::int64_t flipped) {
  const auto header = safetensors::make_header({{.name = "w", .dtype = safetensors::Dtype::u8, .shape = {bytes}}});
  std::ofstream file(path, std::ios::binary);
  file << safetensors::format_header(header);
  file.seekp(static_cast<std::streamoff>(header.data_begin) + bytes - 1);
  file.put('\0');
  file.seekp(static_cast<std::streamoff>(header.data_begin) + flipped);
  file.put('\1');
}

TEST(WeightsIdentity, OfACopyIsTheSameAndOfOtherBytesAnother) {
  const TempDirectory scratch("identity");
  const auto folder = scratch.path() / "model", copy = scratch.path() / "copy";
  std::filesystem::create_directories(folder);
  write_weights(folder / "model.safetensors", 5000, 7);
  const auto whole = weights_identity(folder);
  std::filesystem::copy(folder, copy);
  std::filesystem::last_write_time(copy / "model.safetensors", std::filesystem::file_time_type::min());
  EXPECT_EQ(weights_identity(copy), whole);
  EXPECT_EQ(weights_identity(copy / "model.safetensors"), whole);
  write_weights(copy / "model.safetensors", 5000, 8);
  EXPECT_NE(weights_identity(copy)["hash"], whole["hash"]);
  EXPECT_EQ(weights_identity(copy)["bytes"], whole["bytes"]);
}

TEST(WeightsIdentity, OfALargeFileIsOfItsHeaderAndOfSamplesOfEveryTensor) {
  const TempDirectory scratch("identity");
  constexpr std::int64_t kBytes = 65 << 20;
  const auto identity_with = [&](std::int64_t flipped) {
    write_weights(scratch.path() / "x.safetensors", kBytes, flipped);
    return weights_identity(scratch.path())["hash"].get<std::string>();
  };
  const std::string unsampled = identity_with(5000);
  EXPECT_EQ(identity_with(6000), unsampled);  // what the page says: not every byte is read
  EXPECT_NE(identity_with(0), unsampled);
  EXPECT_NE(identity_with(kBytes - 1), unsampled);
  EXPECT_NE(identity_with(kBytes / 7 * 3), unsampled);
}

TEST(WeightsIdentity, OfAStepIsThatOfItsManifest) {
  const TempDirectory scratch("identity");
  const auto identity_of = [&](const std::string& name, int number) {
    CheckpointManager(scratch.path() / name)
        .save(checkpoint_testing::make_state(number), 3, R"({"path": ")" + name + R"("})");
    return weights_identity(scratch.path() / name / "step-3");
  };
  const auto first = identity_of("a", 1);
  EXPECT_EQ(first["step"], 3);
  EXPECT_EQ(identity_of("b", 1), first) << "metadata are no weights";
  EXPECT_NE(identity_of("c", 2)["hash"], first["hash"]);
}

}  // namespace
}  // namespace phalanx
