#include "phalanx/base/hub_name.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/matchers.h"

namespace phalanx {
namespace {

TEST(HubName, IsOwnerAndNameAlone) {
  EXPECT_TRUE(is_hub_name("meta-llama/Llama-3.1-8B"));
  EXPECT_THAT(hub_hint("Qwen/Qwen3-0.6B"), HasSubstr("nothing is downloaded"));
  for (const char* path : {"", "llama3_8b", "/models/llama", "./a/b", "../models", "a/b/c", "a/", "a b/c", "a/.b"}) {
    EXPECT_FALSE(is_hub_name(path)) << path;
    EXPECT_EQ(hub_hint(path), "") << path;
  }
}

TEST(HubName, AnAddressIsSaidToBeOne) {
  for (const char* path : {"hf://meta-llama/Llama-3.1-8B", "https://huggingface.co/openai/gpt2", "s3://bucket/model"}) {
    EXPECT_THAT(hub_hint(path), HasSubstr("an address, from which nothing is downloaded")) << path;
  }
}

TEST(HubName, APointerOfGitLfsIsNotTheFile) {
  EXPECT_TRUE(is_lfs_pointer("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"));
  EXPECT_FALSE(is_lfs_pointer("version 2"));
  EXPECT_FALSE(is_lfs_pointer(""));
}

TEST(HubName, IsNoneInsideOfAFolderThatExists) {
  const TempDirectory folder;
  const auto before = std::filesystem::current_path();
  std::filesystem::create_directory(folder.path() / "models");
  std::filesystem::current_path(folder.path());
  EXPECT_FALSE(is_hub_name("models/lama"));
  EXPECT_TRUE(is_hub_name("model/lama"));
  std::filesystem::current_path(before);
}

}  // namespace
}  // namespace phalanx
