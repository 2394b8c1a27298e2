#include "phalanx/testing/sim_device/torch/cuda_launches.h"

#include <map>
#include <set>

namespace phalanx::sim_device {
namespace {

const std::set<std::string_view>& of_one_kernel() {
  static const std::set<std::string_view> names = {"_flash_attention_forward",
                                                   "_foreach_add_.Scalar",
                                                   "_fused_adamw_",
                                                   "_scaled_dot_product_flash_attention_for_cpu",
                                                   "_softmax",
                                                   "_softmax_backward_data",
                                                   "add.Tensor",
                                                   "add_.Tensor",
                                                   "addmm",
                                                   "addmm_",
                                                   "arange.start_out",
                                                   "bitwise_and.Tensor",
                                                   "bitwise_right_shift.Tensor",
                                                   "bitwise_xor.Tensor",
                                                   "cat",
                                                   "cos",
                                                   "div.Tensor",
                                                   "fill_.Scalar",
                                                   "gather",
                                                   "gelu",
                                                   "gelu_backward",
                                                   "index_add_",
                                                   "index_select",
                                                   "mm",
                                                   "mm.dtype_out",
                                                   "mm.out",
                                                   "mul.Tensor",
                                                   "mul_.Tensor",
                                                   "native_layer_norm",
                                                   "ne.Scalar",
                                                   "ne.Tensor",
                                                   "neg",
                                                   "pow.Scalar",
                                                   "reciprocal",
                                                   "scatter_add_",
                                                   "searchsorted.Tensor",
                                                   "sin",
                                                   "sub.Tensor",
                                                   "sum.dim_IntList",
                                                   "where.self",
                                                   "zero_"};
  return names;
}

const std::map<std::string_view, int>& of_several() {
  static const std::map<std::string_view, int> launches = {
      // The sums of gradient and output, all three gradients, the conversion of the queries', and where heads share
      // keys and values a sum of each.
      {"_flash_attention_backward", 5},
      {"_scaled_dot_product_flash_attention_for_cpu_backward", 5},  // CUDA's flash attention stands in its place
      {"_grouped_mm", 2},                                           // the groups' addresses; the products
      {"native_layer_norm_backward", 2},                            // of the input; of weight and bias
      {"topk", 2},                                                  // selects, and sorts what is selected
      // More than 2,048 whole numbers: indices, a histogram, a scan, and a pass for every 8 bits.
      {"sort.stable", 12},
      // More than 3,072 rows: sorts them, then sums parts of equal ones.
      {"embedding_dense_backward", 14}};
  return launches;
}

}  // namespace

std::optional<int> cuda_launches(std::string_view name) {
  if (!name.starts_with("aten::")) return 1;  // a kernel or a copy
  name.remove_prefix(std::string_view("aten::").size());
  if (of_one_kernel().contains(name)) return 1;
  const auto found = of_several().find(name);
  return found == of_several().end() ? std::nullopt : std::optional(found->second);
}

}  // namespace phalanx::sim_device
