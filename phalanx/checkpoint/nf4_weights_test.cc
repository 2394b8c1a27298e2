// Files of bitsandbytes in NF4: what is read, and what is refused.
#include "phalanx/checkpoint/nf4_weights.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/folder_test.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/checkpoint/weights.h"

namespace phalanx {
namespace nf4_weights_test {

constexpr std::int64_t kRows = 300, kColumns = 192, kNested = 4;  // 900 blocks, 4 scales of 256 of their scales
const std::string kName = "model.layers.0.self_attn.q_proj.weight";

class BitsAndBytesTest : public FolderTest {
 protected:
  static at::Tensor bytes_of(const std::string& text) {
    const at::Tensor bytes = at::empty({static_cast<std::int64_t>(text.size())}, at::TensorOptions(at::kByte));
    std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
    return bytes;
  }
  static std::string state(const std::string& blocks = "64", const std::string& shape = "[300, 192]") {
    return R"({"quant_type": "nf4", "blocksize": )" + blocks + R"(, "dtype": "float32", "shape": )" + shape +
           R"(, "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": )" +
           fmt::format("{:.17g}", stored_.nested.view(at::kFloat)[kNested].item<float>()) + "}";
  }
  static std::vector<NamedTensor> tensors(const std::string& of_state = state(), const std::string& type = "nf4") {
    return {{kName, stored_.codes.view({-1, 1})},
            {kName + ".absmax", stored_.absmax.flatten()},
            {kName + ".nested_absmax", stored_.nested.view(at::kFloat).narrow(0, 0, kNested).clone()},
            {kName + ".quant_map", tables_->values},
            {kName + ".nested_quant_map", tables_->scales},
            {kName + ".quant_state.bitsandbytes__" + type, bytes_of(of_state)}};
  }
  std::string save(const std::vector<NamedTensor>& all) const {
    export_weights(path("model.safetensors"), all, {}, posix_file_system());
    return path("model.safetensors");
  }
  std::string refusal(const std::vector<NamedTensor>& all) const {
    const std::string file = save(all);
    return error_text<CheckpointError>([&] { BitsAndBytesFiles(file).read(kName, kRows, kColumns, tables_); });
  }

  inline static const std::shared_ptr<const kernels::Nf4Tables> tables_ = kernels::Nf4Tables::make(at::kCPU);
  inline static const kernels::Nf4Weight stored_ = kernels::quantise_nf4(at::randn({kRows, kColumns}), tables_);
};

TEST_F(BitsAndBytesTest, ReadsItsBytes) {
  const BitsAndBytesFiles files(save(tensors()));
  EXPECT_THAT(files.names(), ElementsAre(kName));
  EXPECT_TRUE(files.has(kName));
  EXPECT_FALSE(files.has("model.norm.weight"));
  const kernels::Nf4Weight read = files.read(kName, kRows, kColumns, tables_);
  EXPECT_TRUE(at::equal(read.codes, stored_.codes));
  EXPECT_TRUE(at::equal(read.absmax, stored_.absmax));
  EXPECT_TRUE(at::equal(read.nested, stored_.nested));
  // Each part of a name is one of its matrix, and no other name's.
  for (const NamedTensor& one : tensors()) EXPECT_EQ(files.is_part(one.name), one.name != kName) << one.name;
  EXPECT_FALSE(files.is_part("model.layers.1.self_attn.q_proj.weight.absmax"));
}

TEST_F(BitsAndBytesTest, RefusesOtherKindsByName) {
  auto without = tensors();
  without.erase(without.begin() + 2);
  EXPECT_THAT(refusal(without), AllOf(HasSubstr("q_proj.weight"), HasSubstr("bnb_4bit_use_double_quant = True")));
  EXPECT_THAT(refusal(tensors(state(), "fp4")), HasSubstr("is not in NF4"));
  EXPECT_THAT(refusal(tensors(state("128"))), AllOf(HasSubstr("blocksize"), HasSubstr("64")));
  auto not_finite = tensors();
  not_finite[2].tensor[1] = INFINITY;
  EXPECT_THAT(refusal(not_finite), AllOf(HasSubstr("q_proj.weight"), HasSubstr("are not all finite")));
  EXPECT_THAT(refusal(tensors(state("64", "[192, 300]"))), AllOf(HasSubstr("shape"), HasSubstr("[300, 192]")));
  auto other_codes = tensors();
  other_codes[3].tensor = at::zeros({16});
  EXPECT_THAT(refusal(other_codes), AllOf(HasSubstr(".quant_map"), HasSubstr("holds other values")));
  auto cut = tensors();
  cut[1].tensor = cut[1].tensor.narrow(0, 0, 8);
  EXPECT_THAT(refusal(cut), AllOf(HasSubstr(".absmax"), HasSubstr("expected 900 elements of U8")));
}

TEST_F(BitsAndBytesTest, MatricesAreMadeWideAgain) {
  const at::Tensor norm = at::randn({8});
  const std::vector<NamedTensor> dense = dense_weights({{"wq.weight", stored_.codes},
                                                        {"wq.weight_absmax", stored_.absmax},
                                                        {"wq.weight_nested", stored_.nested},
                                                        {"norm.weight", norm}});
  ASSERT_EQ(dense.size(), 2U);
  EXPECT_EQ(dense[0].name, "wq.weight");
  EXPECT_TRUE(at::equal(dense[0].tensor, kernels::dequantise_nf4(stored_, {.columns = kColumns}, at::kFloat)));
  EXPECT_TRUE(dense[1].tensor.is_same(norm));
  EXPECT_THAT(error_text<CheckpointError>([] {
                dense_weights({{"wq.weight", stored_.codes}, {"wq.weight_absmax", stored_.absmax}});
              }),
              HasSubstr("'wq.weight' is a matrix in 4 bits without its 'wq.weight_nested'"));
}

}  // namespace nf4_weights_test
}  // namespace phalanx
