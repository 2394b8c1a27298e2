#include "phalanx/kernels/low_rank.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "phalanx/kernels/linear.h"
#include "phalanx/kernels/weight_product.h"
#include "phalanx/tensor/scale_in_place.h"
#include "phalanx/tensor/weight_gradient.h"

namespace phalanx::kernels {

at::Tensor LowRank::added_to(at::Tensor y) const {
  if (defined()) y += kernels::linear(x, weight).to(y.scalar_type());
  return y;
}

LowRankRows::LowRankRows(const std::optional<at::Tensor>& x, const std::optional<at::Tensor>& weight, bool records) {
  if (!x) return;
  x_ = x->detach().reshape({-1, x->size(-1)}).contiguous();
  weight_ = *weight;
  used_ = weight->detach().to(x->scalar_type());
  if (records && x->requires_grad()) {
    dx_ = at::empty_like(x_);
    sizes_ = x->sizes().vec();
  }
  if (records && weight->requires_grad()) dweight_ = at::zeros(weight->sizes(), weight->options().dtype(at::kFloat));
}

void LowRankRows::add_to(const at::Tensor& out, std::int64_t from) const {
  if (x_.defined()) out.addmm_(x_.narrow(0, from, out.size(0)), used_.t());
}

void LowRankRows::add_gradients(const at::Tensor& dout, std::int64_t from) {
  const std::int64_t rows = dout.size(0);
  if (dx_.defined()) {
    at::Tensor dx_rows = dx_.narrow(0, from, rows);
    at::mm_out(dx_rows, dout, used_);
  }
  if (dweight_.defined()) add_weight_product(dout, x_.narrow(0, from, rows), {dweight_, 1.0, at::Tensor()});
}

LowRankRows::Gradients LowRankRows::deliver(float factor) {
  if (dx_.defined()) scale_in_place(dx_, factor);
  if (dweight_.defined()) scale_in_place(dweight_, factor);
  return delivered();
}

LowRankRows::Gradients LowRankRows::deliver(const at::Tensor& factor) {
  if (dx_.defined()) scale_in_place(dx_, factor);
  if (dweight_.defined()) scale_in_place(dweight_, factor);
  return delivered();
}

LowRankRows::Gradients LowRankRows::delivered() {
  Gradients gradients;
  if (dx_.defined()) gradients.x = std::exchange(dx_, {}).view(sizes_);
  if (dweight_.defined()) {
    const WeightGradient out = weight_gradient(weight_);
    out.beta == 0.0 ? out.out.copy_(dweight_) : out.out.add_(dweight_);
    gradients.weight = out.returned;
  }
  return gradients;
}

}  // namespace phalanx::kernels
