#include "phalanx/kernels/embedding.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include "phalanx/kernels/deferred_weights.h"
#include "phalanx/tensor/grad_ready.h"
#include "phalanx/tensor/weight_gradient.h"

namespace phalanx::kernels {
namespace {

constexpr std::int64_t kEmbeddingGrain = 32768;  // minimum elements per thread

// The positions of each id, in order: those of id i are positions[starts[i]] to positions[starts[i + 1] - 1].
struct Positions {
  Positions(const std::int64_t* ids, std::int64_t n, std::int64_t count)
      : starts(static_cast<std::size_t>(count) + 1), positions(static_cast<std::size_t>(n)) {
    for (std::int64_t k = 0; k < n; ++k) ++starts[static_cast<std::size_t>(ids[k]) + 1];
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
    std::vector<std::int64_t> next(starts.begin(), starts.end() - 1);
    for (std::int64_t k = 0; k < n; ++k)
      positions[static_cast<std::size_t>(next[static_cast<std::size_t>(ids[k])]++)] = k;
  }
  std::vector<std::int64_t> starts, positions;
};

// A row's contributions are summed first, 16-bit ones in float32, and then added to the existing values, as if the
// gradient were a separate tensor.
template <class T>
void sum_rows(const Positions& where, const T* dy, T* out, std::int64_t dim, bool add) {
  const auto count = static_cast<std::int64_t>(where.starts.size()) - 1;
  const std::int64_t grain = std::max<std::int64_t>(kEmbeddingGrain / std::max<std::int64_t>(dim, 1), 1);
  at::parallel_for(0, count, grain, [&](std::int64_t begin, std::int64_t end) {
    using Sum = at::opmath_type<T>;
    std::vector<Sum> sum(static_cast<std::size_t>(dim));
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t *first = where.positions.data() + where.starts[static_cast<std::size_t>(row)],
                         *last = where.positions.data() + where.starts[static_cast<std::size_t>(row) + 1];
      if (add && first == last) continue;
      T* const in_table = out + row * dim;
      Sum* const total = sum.data();
      std::fill_n(total, dim, Sum(0));
      for (const std::int64_t* k = first; k != last; ++k) {
        const T* part = dy + *k * dim;
        for (std::int64_t j = 0; j < dim; ++j) total[j] += static_cast<Sum>(part[j]);
      }
      for (std::int64_t j = 0; j < dim; ++j) {
        const auto made = static_cast<T>(total[j]);
        in_table[j] = add ? static_cast<T>(static_cast<Sum>(in_table[j]) + static_cast<Sum>(made)) : made;
      }
    }
  });
}

struct EmbeddingFunction : torch::autograd::Function<EmbeddingFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& weight, const at::Tensor& ids) {
    ctx->save_for_backward({ids});
    // Not saved as a variable: its values are not needed, so they may change before the backward pass.
    ctx->saved_data["weight"] = weight;
    save_queue_for_backward(*ctx);
    return at::embedding(weight, ids);
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const at::Tensor ids = ctx->get_saved_variables()[0], weight = ctx->saved_data["weight"].toTensor();
    if (at::GradMode::is_enabled()) return {by_aten(grads[0], ids, weight), at::Tensor()};  // create_graph
    if (const auto later = queue_for(*ctx, weight); later.queue) {
      later.queue->put(later.key, weight, [dy = grads[0], ids, weight](const WeightGradient& dweight) {
        add_rows(dy, ids, weight, dweight);
      });
      return {at::Tensor(), at::Tensor()};
    }
    const WeightGradient dweight = weight_gradient(weight);
    add_rows(grads[0], ids, weight, dweight);
    return {dweight.returned, at::Tensor()};
  }

 private:
  static at::Tensor by_aten(const at::Tensor& dy, const at::Tensor& ids, const at::Tensor& weight) {
    const at::Tensor wide = dy.itemsize() == 2 ? dy.to(at::kFloat) : dy;  // it sums in dy's type
    return at::embedding_dense_backward(wide, ids, weight.size(0), /*padding_idx=*/-1, /*scale_grad_by_freq=*/false)
        .to(dy.scalar_type());
  }

  static void add_rows(const at::Tensor& dy_in, const at::Tensor& ids, const at::Tensor& weight,
                       const WeightGradient& dweight) {
    const bool add = dweight.beta != 0.0;
    if (!dweight.out.is_contiguous()) {
      add ? dweight.out.add_(by_aten(dy_in, ids, weight)) : dweight.out.copy_(by_aten(dy_in, ids, weight));
      return;
    }
    const at::Tensor numbers = ids.to(at::kLong).contiguous(), dy = dy_in.contiguous();
    const Positions where(numbers.const_data_ptr<std::int64_t>(), numbers.numel(), weight.size(0));
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, dy.scalar_type(), "embedding_backward", [&] {
      sum_rows(where, dy.const_data_ptr<scalar_t>(), dweight.out.mutable_data_ptr<scalar_t>(), weight.size(1), add);
    });
  }
};

}  // namespace

at::Tensor embedding(const at::Tensor& weight, const at::Tensor& ids) {
  const bool is_trained = at::GradMode::is_enabled() && weight.requires_grad() && weight.device().is_cpu();
  // ATen sums gradients of 16 bits in their own type.
  const bool brings_gradient =
      is_trained && (weight.itemsize() == 2 || grad_buffer(weight).defined() || WeightGradientQueue::current().queue);
  return brings_gradient ? EmbeddingFunction::apply(weight, ids) : at::embedding(weight, ids);
}

}  // namespace phalanx::kernels
