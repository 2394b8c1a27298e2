#include "phalanx/checkpoint/weights.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/faulty_file_system.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/checkpoint/files/safetensors.h"
#include "phalanx/checkpoint/files/weights_identity.h"
#include "phalanx/checkpoint/testing/test_state.h"

namespace phalanx {
namespace {

std::vector<NamedTensor> two_layers() { return {{"embed", at::randn({4, 3})}, {"norm", at::randn({3})}}; }
std::vector<NamedTensor> zeros_like_all(const std::vector<NamedTensor>& tensors) {
  std::vector<NamedTensor> result;
  for (const auto& [name, tensor, shard] : tensors) result.push_back({name, at::zeros(tensor.sizes())});
  return result;
}
void export_to(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors,
               ExportWeightsOptions options = {}) {
  export_weights(path, tensors, options, posix_file_system());
}
bool equal(const std::vector<NamedTensor>& a, const std::vector<NamedTensor>& b) {
  return std::ranges::equal(a, b, [](const auto& x, const auto& y) { return x.tensor.equal(y.tensor); });
}
std::string to_theirs(const std::string& name) { return "theirs." + name; }

TEST(Weights, GoThroughAFileUnderOtherNames) {
  const TempDirectory scratch("weights");
  const auto path = scratch.path() / "w.safetensors";
  const auto ours = two_layers();
  export_to(path, ours, {.key_mapping = to_theirs, .metadata = {{"origin", "test"}}});
  const safetensors::File file(path.string());
  EXPECT_NE(file.find("theirs.embed"), nullptr);
  EXPECT_EQ(file.header().metadata.at("format"), "pt");
  EXPECT_EQ(file.header().metadata.at("origin"), "test");

  const auto loaded = zeros_like_all(ours);
  EXPECT_EQ(load_weights(path, loaded, {.key_mapping = to_theirs}).bytes, 60u);
  EXPECT_TRUE(equal(loaded, ours));
}

TEST(Weights, AreConvertedOnTheWayOutAndIn) {
  const TempDirectory scratch("weights");
  const auto path = scratch.path() / "w.safetensors";
  const auto ours = two_layers();
  export_to(path, ours, {.dtype = at::kBFloat16});
  EXPECT_EQ(safetensors::File(path.string()).find("norm")->dtype, safetensors::Dtype::bf16);
  const auto loaded = zeros_like_all(ours);
  load_weights(path, loaded);
  for (std::size_t i = 0; i < ours.size(); ++i)
    EXPECT_TRUE(loaded[i].tensor.equal(ours[i].tensor.to(at::kBFloat16).to(at::kFloat)));
}

// Queries, keys and values of GPT-2, as one matrix that is turned, with a prefix that a file may lack.
TEST(Weights, GoIntoPartsOfAFilesTensorsAndOutOfThem) {
  const TempDirectory scratch("weights");
  const auto path = scratch.path() / "w.safetensors";
  const std::vector<NamedTensor> ours = {{"q", at::randn({2, 3})}, {"k", at::randn({2, 3})}, {"b", at::randn({4})}};
  const KeyMapping place = [](const std::string& name) -> FileTensorView {
    if (name == "b") return std::string("base.b");
    return {"base.qk", {.transposed = true, .part = name == "q" ? 0 : 1, .parts = 2}};
  };
  export_to(path, ours, {.key_mapping = place});
  const std::vector<NamedTensor> theirs = {{"base.qk", at::zeros({3, 4})}, {"base.b", at::zeros({4})}};
  load_weights(path, theirs);
  EXPECT_TRUE(theirs[0].tensor.equal(at::cat({ours[0].tensor, ours[1].tensor}).t()));
  const auto loaded = zeros_like_all(ours);
  EXPECT_EQ(load_weights(path, loaded, {.key_mapping = place}).bytes, 64u);
  EXPECT_TRUE(equal(loaded, ours));

  export_to(path, {{"qk", theirs[0].tensor}, {"b", theirs[1].tensor}, {"mask", at::zeros({1})}});
  const auto bare = zeros_like_all(ours);
  EXPECT_THAT(error_text<CheckpointError>([&] { load_weights(path, bare, {.key_mapping = place}); }),
              HasSubstr("\"base.qk\" is missing (expected F32 [3, 4])"));
  load_weights(path, bare, {.key_mapping = place, .optional_prefix = "base.", .ignore = [](const std::string& name) {
                              return name == "base.mask";
                            }});
  EXPECT_TRUE(equal(bare, ours));
  EXPECT_THAT(error_text<CheckpointError>([&] { export_to(path, {ours[0]}, {.key_mapping = place}); }),
              HasSubstr("\"base.qk\": 1 of the 2 parts"));
  EXPECT_THAT(error_text<CheckpointError>([&] {
                export_to(path, {ours[0], ours[0]}, {.key_mapping = place});
              }),
              HasSubstr("two tensors are to be written under the name \"base.qk\""));
}

// Gate and up of several experts, in one tensor of the file.
TEST(Weights, GoIntoSlicesOfAFilesTensorsAndOutOfThem) {
  const TempDirectory scratch("weights");
  const auto path = scratch.path() / "w.safetensors";
  const std::vector<NamedTensor> ours = {{"0.gate", at::randn({2, 3})}, {"0.up", at::randn({2, 3})},
                                         {"1.gate", at::randn({2, 3})}, {"1.up", at::randn({2, 3})},
                                         {"0.bias", at::randn({4})},    {"1.bias", at::randn({4})}};
  const KeyMapping place = [](const std::string& name) -> FileTensorView {
    const std::int64_t slice = name[0] - '0';
    if (name.ends_with("bias")) return {"bias", {.slice = slice, .slices = 2}};
    return {"gate_up",
            {.transposed = true,
             .part = name.ends_with("up") ? 1 : 0,
             .parts = 2,
             .alternate = true,
             .slice = slice,
             .slices = 2}};
  };
  export_to(path, ours, {.key_mapping = place});
  const std::vector<NamedTensor> theirs = {{"gate_up", at::zeros({2, 3, 4})}, {"bias", at::zeros({2, 4})}};
  load_weights(path, theirs);
  for (std::int64_t expert = 0; expert < 2; ++expert) {
    const auto first = static_cast<std::size_t>(2 * expert);
    EXPECT_TRUE(theirs[0].tensor[expert].slice(1, 0, std::nullopt, 2).equal(ours[first].tensor.t()));
    EXPECT_TRUE(theirs[0].tensor[expert].slice(1, 1, std::nullopt, 2).equal(ours[first + 1].tensor.t()));
    EXPECT_TRUE(theirs[1].tensor[expert].equal(ours[static_cast<std::size_t>(4 + expert)].tensor));
  }
  const auto loaded = zeros_like_all(ours);
  load_weights(path, loaded, {.key_mapping = place});
  EXPECT_TRUE(equal(loaded, ours));
  EXPECT_THAT(error_text<CheckpointError>([&] {
                export_to(path, {ours[0], ours[1]}, {.key_mapping = place});
              }),
              HasSubstr("\"gate_up\": 2 of the 4 parts"));
}

TEST(Weights, ADirectoryIsReadByItsIndex) {
  const TempDirectory scratch("weights");
  const auto ours = two_layers();
  export_to(scratch.path() / "model-00001-of-00002.safetensors", {ours[0]});
  export_to(scratch.path() / "model-00002-of-00002.safetensors", {ours[1]});
  const auto loaded = zeros_like_all(ours);
  EXPECT_THAT(error_text<CheckpointError>([&] { load_weights(scratch.path(), loaded); }),
              HasSubstr("found 2 such files"));
  write_file(scratch.path() / "model.safetensors.index.json",
             R"({"metadata": {"total_size": 60}, "weight_map": {"embed": "model-00001-of-00002.safetensors",
            "norm": "model-00002-of-00002.safetensors"}})");
  EXPECT_EQ(load_weights(scratch.path(), loaded).files.size(), 2u);
  EXPECT_TRUE(equal(loaded, ours));
}

TEST(Weights, ADirectoryOfTwoModelsIsRefused) {
  const TempDirectory folder("weights");
  const auto ours = two_layers();
  export_to(folder.path() / "model.safetensors", ours);
  const auto load = [&] {
    return error_text<CheckpointError>([&] { load_weights(folder.path(), zeros_like_all(ours), {}); });
  };
  const auto identity = [&] { return error_text<CheckpointError>([&] { weights_identity(folder.path()); }); };
  EXPECT_EQ(load(), "");
  write_file(folder.path() / "model.safetensors.index.json",
             R"({"weight_map": {"embed": "model.safetensors", "norm": "model.safetensors"}})");
  EXPECT_EQ(load(), "");
  export_to(folder.path() / "model-00001-of-00001.safetensors", two_layers());
  write_file(folder.path() / "model.safetensors.index.json",
             R"({"weight_map": {"embed": "model-00001-of-00001.safetensors"}})");
  for (const std::string& said : {load(), identity()}) {
    EXPECT_THAT(said, AllOf(HasSubstr("holds two models: model.safetensors, and model.safetensors.index.json"),
                            HasSubstr("take one of them away")));
  }
  std::filesystem::remove(folder.path() / "model.safetensors.index.json");
  write_file(folder.path() / "adapter_config.json", "{}");
  for (const std::string& said : {load(), identity()}) {
    EXPECT_THAT(said, AllOf(HasSubstr("holds an adapter (PEFT"), HasSubstr("this as --adapter"),
                            HasSubstr("`phalanx checkpoint merge`")));
  }
}

TEST(Weights, AnIndexMayNotLeadOutOfItsDirectory) {
  const TempDirectory scratch("weights");
  const auto index = [&](const std::string& text) {
    write_file(scratch.path() / "model.safetensors.index.json", text);
    return error_text<CheckpointError>([&] { load_weights(scratch.path(), two_layers()); });
  };
  for (const std::string file : {"../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors",
                                 "..\\\\x.safetensors", "passwd", "", "x.safetensors\\u0000.safetensors"})
    EXPECT_THAT(index(R"({"weight_map": {"embed": ")" + file + R"("}})"), HasSubstr("in the same directory")) << file;
  EXPECT_THAT(index("{"), HasSubstr("index.json: not valid JSON at column 2"));
  EXPECT_THAT(index("{}"), HasSubstr("\"weight_map\""));
  EXPECT_THAT(index(R"({"weight_map": {}})"), HasSubstr("empty"));
  EXPECT_THAT(index(R"({"weight_map": {"embed": 3}})"), HasSubstr("not a string"));
  EXPECT_THAT(index(std::string(200'000, '[')), HasSubstr("model.safetensors.index.json: its JSON nests deeper"));
  EXPECT_THAT(error_text<Error>([&] {
                write_file(scratch.path() / "model.safetensors.index.json",
                           R"({"weight_map": {"embed": "gone.safetensors"}})");
                load_weights(scratch.path(), two_layers());
              }),
              HasSubstr("index.json: gone.safetensors is named there but is not in the directory"));
}

TEST(Weights, AnIndexMustBeRightAboutItsFiles) {
  const TempDirectory scratch("weights");
  const auto ours = two_layers();
  export_to(scratch.path() / "a.safetensors", {ours[0]});
  export_to(scratch.path() / "b.safetensors", {ours[1]});
  write_file(scratch.path() / "model.safetensors.index.json",
             R"({"weight_map": {"embed": "a.safetensors", "norm": "a.safetensors", "third": "b.safetensors"}})");
  EXPECT_THAT(error_text<CheckpointError>([&] { load_weights(scratch.path(), zeros_like_all(ours)); }),
              HasSubstr("index.json: tensor \"norm\" is said to be in a.safetensors, which does not have it"));
}

TEST(Weights, DifferencesAreNamedAndNothingIsOverwritten) {
  const TempDirectory scratch("weights");
  const auto path = scratch.path() / "w.safetensors";
  export_to(path, {{"embed", at::randn({4, 4})}, {"inv_freq", at::randn({2})}, {"norm", at::randn({3})}});
  const auto loaded = zeros_like_all(two_layers());
  auto message = error_text<CheckpointError>([&] { load_weights(path, loaded); });
  EXPECT_THAT(message, HasSubstr("\"embed\": expected F32 [4, 3], found F32 [4, 4]"));
  EXPECT_THAT(message, HasSubstr("\"inv_freq\" is unexpected"));
  EXPECT_TRUE(loaded[1].tensor.equal(at::zeros({3})));

  // Integers are not weights.
  export_to(path, {{"norm", at::zeros({3}, at::kInt)}});
  message = error_text<CheckpointError>([&] { load_weights(path, {{"norm", at::zeros({3})}}); });
  EXPECT_THAT(message, HasSubstr("\"norm\": expected F32 [3], found I32 [3]"));

  const std::vector<NamedTensor> one{{"norm", at::zeros({3})}, {"other", at::zeros({1})}};
  message = error_text<CheckpointError>(
      [&] { load_weights(path, one, {.ignore = [](const std::string& name) { return name != "norm"; }}); });
  EXPECT_THAT(message, HasSubstr("\"other\" is missing"));
  EXPECT_THAT(message, Not(HasSubstr("unexpected")));
}

TEST(Weights, OfAPhalanxCheckpointAreItsModelTensors) {
  const TempDirectory scratch("weights");
  const auto saved = checkpoint_testing::make_state(4);
  const auto folder = CheckpointManager(scratch.path()).save(saved, 1).path;
  const auto norm = at::zeros({5});  // saved as bf16
  load_weights(folder, {{"norm.weight", norm}},
               {.elsewhere = [](const std::string& name) { return name != "norm.weight"; }});
  EXPECT_TRUE(norm.equal(saved.tensors[1].tensor.to(at::kFloat)));
}

TEST(Weights, AFailedExportLeavesNothingAndKeepsTheOld) {
  const TempDirectory scratch("weights");
  const auto path = scratch.path() / "w.safetensors";
  export_to(path, two_layers());
  const auto before = read_file(path);
  FaultyFileSystem counter(posix_file_system());
  export_weights(scratch.path() / "other.safetensors", two_layers(), {}, counter);
  for (std::int64_t n = 0; n + 1 < counter.operations(); ++n) {  // all but the last: syncing the directory
    FaultyFileSystem fs(posix_file_system(), {.fail_at = n});
    EXPECT_THROW(export_weights(path, two_layers(), {}, fs), Error);
    EXPECT_EQ(read_file(path), before) << n;
    EXPECT_FALSE(std::filesystem::exists(scratch.path() / "w.safetensors.tmp")) << n;
  }
}

// If a file has a matrix twice and both are equal, it is one matrix in the model.
TEST(Weights, ACopyInTheFileMustBeOne) {
  const TempDirectory scratch("weights");
  const auto path = scratch.path() / "w.safetensors";
  auto theirs = two_layers();
  const at::Tensor embed = theirs[0].tensor;
  theirs.push_back({"head", embed.clone()});
  const LoadWeightsOptions tied{.ignore = [](const std::string& name) { return name == "head"; },
                                .copy_in_file = [](const std::string& name) { return name == "embed" ? "head" : ""; }};
  const auto loaded = zeros_like_all(two_layers());
  export_to(path, theirs);
  EXPECT_THAT(load_weights(path, loaded, tied).ignored, IsEmpty()) << "it is compared";
  EXPECT_TRUE(loaded[0].tensor.equal(embed));
  // In another type the same values are the same.
  theirs[0].tensor = embed.to(at::kBFloat16);
  theirs[2].tensor = theirs[0].tensor.to(at::kDouble);
  export_to(path, theirs);
  load_weights(path, loaded, tied);

  theirs[0].tensor = embed;
  theirs[2].tensor = embed.clone();
  theirs[2].tensor[3][1].add_(1);
  export_to(path, theirs);
  const auto message = error_text<CheckpointError>([&] { load_weights(path, loaded, tied); });
  EXPECT_THAT(message, HasSubstr("\"embed\" and \"head\" are one matrix (its embeddings are tied)"));
  EXPECT_THAT(message, HasSubstr("\"tie_word_embeddings\": false"));
  // If only a part of the rows is loaded, only those are compared.
  theirs[2].tensor = embed.narrow(0, 0, 3).clone();
  export_to(path, theirs);
  EXPECT_THAT(error_text<CheckpointError>([&] { load_weights(path, loaded, tied); }),
              HasSubstr("\"embed\": expected F32 [4, 3], found F32 [3, 3]"));
}

TEST(Weights, OfACheckpointThatHasMoreAreRefused) {
  const TempDirectory scratch("weights");
  const auto w = at::zeros({2}), v = at::zeros({3});
  const auto folder =
      CheckpointManager(scratch.path()).save({.tensors = {{"model.w", w}, {"model.v", v}, {"optimizer.w", w}}}, 1).path;
  EXPECT_THAT(error_text<CheckpointError>([&] {
                load_weights(folder, {{"w", w}});
              }),
              HasSubstr("\"model.v\" is unexpected"));
  load_weights(folder, {{"w", w}}, {.elsewhere = [](const std::string& name) { return name == "v"; }});
}

TEST(Weights, NamesThatDifferInNumbersAreOneInALine) {
  EXPECT_EQ(brief_names({"a.0.x", "a.1.x", "head", "a.11.x", "b2.w"}), "a.*.x (3), head, b2.w");
}

TEST(Weights, GoIntoSeveralFilesAndAnIndexWhereOneWouldBeTooLarge) {
  const TempDirectory scratch("weights");
  const auto folder = scratch.path() / "hf";
  const std::vector<NamedTensor> ours{{"a", at::randn({4, 3})}, {"b", at::randn({3})}, {"c", at::randn({20})}};
  const auto names = [&] {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      found.push_back(entry.path().filename().string());
    std::ranges::sort(found);
    return found;
  };
  const auto loads = [&] {
    const auto loaded = zeros_like_all(ours);
    load_weights(folder, loaded);
    return equal(loaded, ours);
  };
  EXPECT_EQ(export_weights_to_folder(folder, ours, {}, posix_file_system()).size(), 1U);
  EXPECT_THAT(names(), ElementsAre("model.safetensors"));
  EXPECT_TRUE(loads());
  // Each export replaces the last one, whatever its files are called.
  export_weights_to_folder(folder, ours, {.max_file_bytes = 64}, posix_file_system());
  EXPECT_THAT(names(), ElementsAre("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                                   "model.safetensors.index.json"));
  EXPECT_TRUE(loads());
  export_weights_to_folder(folder, ours, {.max_file_bytes = 20}, posix_file_system());
  EXPECT_EQ(names().size(), 4U);
  EXPECT_TRUE(loads());
  export_weights_to_folder(folder, ours, {.max_file_bytes = 64}, posix_file_system());
  FaultyFileSystem counter(posix_file_system());
  export_weights_to_folder(folder, ours, {.max_file_bytes = 64}, counter);
  // A failure leaves the old weights, the new ones, or files that are refused.
  const auto other = zeros_like_all(ours);
  for (std::int64_t n = 0; n < counter.operations(); ++n) {
    export_weights_to_folder(folder, ours, {.max_file_bytes = 64}, posix_file_system());
    FaultyFileSystem fs(posix_file_system(), {.fail_at = n});
    EXPECT_THROW(export_weights_to_folder(folder, other, {.max_file_bytes = 64}, fs), Error) << n;
    const auto loaded = zeros_like_all(ours);
    try {
      load_weights(folder, loaded);
      EXPECT_TRUE(equal(loaded, ours) || equal(loaded, other)) << n;
    } catch (const CheckpointError&) {
    }
    for (const auto& name : names()) EXPECT_FALSE(name.ends_with(".tmp")) << n;
  }
}

/// Runs Python with the safetensors package that the build's torch lies beside; false if there is none.
bool run_python(const std::string& program, const std::filesystem::path& scratch) {
  write_file(scratch / "program.py", program);
  const std::string python = PHALANX_TEST_PYTHON;
  return std::system((python + " " + (scratch / "program.py").string()).c_str()) == 0;
}
bool python_has_safetensors(const std::filesystem::path& scratch) {
  return run_python(
      "import importlib.util as u, sys\nsys.exit(not (u.find_spec('safetensors') and u.find_spec('numpy')))", scratch);
}

TEST(Weights, PythonReadsOurs) {
  const TempDirectory scratch("weights");
  if (!python_has_safetensors(scratch.path())) GTEST_SKIP() << "no Python with safetensors and numpy";
  const auto path = scratch.path() / "ours.safetensors";
  export_to(path, {{"a", at::arange(6, at::TensorOptions().dtype(at::kFloat)).reshape({2, 3})},
                   {"b", at::arange(3, at::TensorOptions().dtype(at::kLong))},
                   {"scalar", at::full({}, 2.5)},
                   {"flag", at::full({1}, true, at::TensorOptions().dtype(at::kBool))},
                   {"half", at::full({2}, 0.5, at::TensorOptions().dtype(at::kHalf))}});
  EXPECT_TRUE(
      run_python("import numpy as np\nfrom safetensors import safe_open\n"
                 "f = safe_open('" +
                     path.string() + R"(', 'np')
assert f.metadata() == {'format': 'pt'}, f.metadata()
assert sorted(f.keys()) == ['a', 'b', 'flag', 'half', 'scalar'], f.keys()
a = f.get_tensor('a')
assert a.dtype == np.float32 and (a == np.arange(6).reshape(2, 3)).all(), a
b = f.get_tensor('b')
assert b.dtype == np.int64 and (b == np.arange(3)).all(), b
assert f.get_tensor('scalar').shape == () and f.get_tensor('scalar') == 2.5
assert f.get_tensor('flag').dtype == bool and f.get_tensor('flag')[0]
assert f.get_tensor('half').dtype == np.float16 and (f.get_tensor('half') == 0.5).all()
)",
                 scratch.path()));
}

TEST(Weights, WeReadPythons) {
  const TempDirectory scratch("weights");
  if (!python_has_safetensors(scratch.path())) GTEST_SKIP() << "no Python with safetensors and numpy";
  const auto path = scratch.path() / "theirs.safetensors";
  ASSERT_TRUE(
      run_python("import numpy as np\nfrom safetensors.numpy import save_file\n"
                 "save_file({'f64': np.arange(4.0).reshape(2, 2), 'i8': np.array([-1, 2, 3], dtype=np.int8),\n"
                 "  'empty': np.zeros((0, 2), dtype=np.float32), 'f32': np.array([0.25], dtype=np.float32)},\n"
                 "  '" +
                     path.string() + "', metadata={'note': 'x'})\n",
                 scratch.path()));
  const std::vector<NamedTensor> loaded{{"f64", at::zeros({2, 2}, at::TensorOptions().dtype(at::kDouble))},
                                        {"i8", at::zeros({3}, at::TensorOptions().dtype(at::kChar))},
                                        {"empty", at::zeros({0, 2})},
                                        {"f32", at::zeros({1})}};
  load_weights(path, loaded);
  EXPECT_TRUE(loaded[0].tensor.equal(at::arange(4, at::TensorOptions().dtype(at::kDouble)).reshape({2, 2})));
  EXPECT_EQ(loaded[1].tensor.sum().item<std::int64_t>(), 4);
  EXPECT_EQ(loaded[3].tensor.item<float>(), 0.25f);
}

}  // namespace
}  // namespace phalanx
