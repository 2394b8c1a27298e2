#include "phalanx/parallel/tensor/overlapped_layers.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/kernels/deferred_weights.h"
#include "phalanx/kernels/fused_linear.h"
#include "phalanx/kernels/saved_activations.h"
#include "phalanx/kernels/swiglu_feed_forward.h"
#include "phalanx/parallel/tensor/chunked_collectives.h"
#include "phalanx/parallel/tensor/functional_collectives.h"
#include "phalanx/tensor/weight_gradient.h"

namespace phalanx {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

constexpr std::int64_t kHiddenRows = 512;  // of a hidden layer at a time, so that they stay in a CPU's cache

struct Exchange : torch::CustomClassHolder {
  Exchange(std::shared_ptr<Communicator> group, std::int64_t dim) : group(std::move(group)), dim(dim) {}
  std::shared_ptr<Communicator> group;
  std::int64_t dim;
};
using ExchangePtr = c10::intrusive_ptr<Exchange>;

void save_exchange(AutogradContext& ctx, const ExchangePtr& exchange) {
  ctx.saved_data["exchange"] = c10::IValue::make_capsule(exchange);
  kernels::save_queue_for_backward(ctx);
}

ExchangePtr saved_exchange(const AutogradContext& ctx) {
  if (at::GradMode::is_enabled()) {
    throw Error(
        "tensor parallel: create_graph through layers whose products overlap communication, which are differentiable "
        "once; expected .overlap = false in the plan");
  }
  const auto capsule = ctx.saved_data.at("exchange").toCapsule();
  return ExchangePtr::reclaim_copy(static_cast<Exchange*>(capsule.get()));
}

at::Tensor as_rows(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }
at::Tensor rows_of(const at::Tensor& rows, const RowChunk& chunk) { return rows.narrow(0, chunk.first, chunk.count); }

// On the CPU blocks of kHiddenRows rows; on a device the whole chunk, as larger products fill it better.
template <class Body>
void in_blocks(const RowChunk& chunk, const at::Tensor& rows, Body body) {
  const std::int64_t block = rows.device().is_cpu() ? kHiddenRows : chunk.count;
  for (std::int64_t from = 0; from < chunk.count; from += block) {
    body(from, chunk.first + from, std::min(block, chunk.count - from));
  }
}

// Whether products with these weights are one product there. On the CPU each has its own, whose results are contiguous.
bool are_one_product(const tensor_list& weights) {
  return weights.size() > 1 && !weights[0].device().is_cpu() && kernels::are_adjacent(weights);
}

// dy^T x: what backward() returns for the weight. Undefined if the gradient is already in its buffer, or is computed
// later.
at::Tensor weight_product(const AutogradContext& ctx, std::size_t input, const at::Tensor& weight, const at::Tensor& dy,
                          const at::Tensor& x) {
  if (!ctx.needs_input_grad(input)) return {};
  if (const auto later = kernels::queue_for(ctx, weight); later.queue) {
    later.queue->put(later.key, weight, [dy, x = x.detach()](const WeightGradient& dweight) {
      dweight.out.addmm_(dy.t(), x, dweight.beta);
    });
    return {};
  }
  const WeightGradient dweight = weight_gradient(weight);
  dweight.out.addmm_(dy.t(), x, dweight.beta);
  return dweight.returned;
}

// As weight_product() for several weights of one x, with the places of each among the inputs of forward(). dy_of_all,
// unless undefined, has the columns of all dys.
tensor_list weight_products(const AutogradContext& ctx, const std::vector<std::size_t>& inputs,
                            const tensor_list& weights, const tensor_list& dys, const at::Tensor& dy_of_all,
                            const at::Tensor& x) {
  tensor_list result;
  bool at_once = dy_of_all.defined();
  for (std::size_t i = 0; i < weights.size(); ++i) {
    at_once = at_once && ctx.needs_input_grad(inputs[i]) && !kernels::queue_for(ctx, weights[i]).queue;
  }
  if (at_once) return kernels::stacked_weight_gradients(dy_of_all, x, weights);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    result.push_back(weight_product(ctx, inputs[i], weights[i], dys[i], x));
  }
  return result;
}

// gates and ups [rows, hidden]: on a device the halves of one tensor, which a single product can write.
struct GatesAndUps {
  GatesAndUps(std::int64_t rows, std::int64_t hidden, const at::TensorOptions& options) {
    if (options.device().is_cpu()) {
      gates = at::empty({rows, hidden}, options), ups = at::empty({rows, hidden}, options);
    } else {
      both = at::empty({rows, 2 * hidden}, options);
      gates = both.narrow(1, 0, hidden), ups = both.narrow(1, hidden, hidden);
    }
  }
  at::Tensor both;  // undefined on the CPU
  at::Tensor gates, ups;
};

struct AllGatherMatmul : torch::autograd::Function<AllGatherMatmul> {
  static tensor_list forward(AutogradContext* ctx, const at::Tensor& x_part, const at::Tensor& w0,
                             const std::optional<at::Tensor>& w1, const std::optional<at::Tensor>& w2,
                             const ExchangePtr& exchange) {
    tensor_list weights = {w0};
    for (const auto& weight : {w1, w2}) {
      if (weight) weights.push_back(*weight);
    }
    const ChunkedAllGather x(x_part, exchange->dim, *exchange->group);
    const auto outputs = products(x, weights);
    tensor_list saved = {x.rows()};
    saved.insert(saved.end(), weights.begin(), weights.end());
    ctx->save_for_backward(saved);
    ctx->saved_data["part"] = x_part.sizes().vec();
    save_exchange(*ctx, exchange);
    tensor_list results;
    for (const at::Tensor& y : outputs) results.push_back(y.view(x.layout().of_width(y.size(-1)).whole));
    return results;
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const ExchangePtr exchange = saved_exchange(*ctx);
    const auto saved = ctx->get_saved_variables();
    const tensor_list weights(saved.begin() + 1, saved.end());
    tensor_list dys, result(5);
    for (const at::Tensor& grad : grads) dys.push_back(as_rows(grad));
    const bool is_one = are_one_product(weights);
    const at::Tensor dy_of_all = is_one ? at::cat(dys, 1) : at::Tensor();
    std::optional<ChunkedReduceScatter> dx;
    if (ctx->needs_input_grad(0)) {
      const auto part = ctx->saved_data.at("part").toIntVector();
      dx.emplace(RowLayout::of_part(part, exchange->dim, *exchange->group), saved[0].options(), *exchange->group);
      for (const RowChunk& chunk : dx->chunks()) {
        at::Tensor rows = dx->buffer(chunk);
        if (is_one) at::mm_out(rows, rows_of(dy_of_all, chunk), kernels::stacked(weights));
        for (std::size_t i = 0; i < dys.size() && !is_one; ++i) {
          const at::Tensor dy = rows_of(dys[i], chunk);
          i == 0 ? at::mm_out(rows, dy, weights[0]) : rows.addmm_(dy, weights[i]);
        }
        dx->send(chunk);
      }
    }
    const tensor_list made = weight_products(*ctx, {1, 2, 3}, weights, dys, dy_of_all, saved[0]);
    std::ranges::copy(made, result.begin() + 1);
    if (dx) result[0] = dx->finish();
    return result;
  }

 private:
  static void multiply(const ChunkedAllGather& x, const RowChunk& chunk, const at::Tensor& weight,
                       const at::Tensor& y) {
    at::Tensor rows = rows_of(y, chunk);
    at::mm_out(rows, x.wait(chunk), weight.t());
  }

  static tensor_list products(const ChunkedAllGather& x, const tensor_list& weights) {
    const auto buffer = [&](const at::Tensor& weight) {
      return at::empty({x.layout().rows(), weight.size(0)}, x.rows().options());
    };
    tensor_list ys;
    if (are_one_product(weights)) {
      const at::Tensor all = kernels::stacked(weights);
      const at::Tensor y = kernels::computed_once(kernels::SavedOp::linear, [&] {
        const at::Tensor made = buffer(all);
        for (const RowChunk& chunk : x.chunks()) multiply(x, chunk, all, made);
        return tensor_list{made};
      })[0];
      for (const RowChunk& chunk : x.chunks()) x.wait(chunk);
      std::int64_t first = 0;
      for (const at::Tensor& weight : weights) {
        ys.push_back(y.narrow(1, first, weight.size(0)));
        first += weight.size(0);
      }
      ys.back() = ys.back().contiguous();  // attention keeps values, and with them would keep all
      return ys;
    }
    if (kernels::SavedActivations::current() != nullptr) {  // some are not recomputed: one after the other
      for (const at::Tensor& weight : weights) {
        ys.push_back(kernels::computed_once(kernels::SavedOp::linear, [&] {
          const at::Tensor y = buffer(weight);
          for (const RowChunk& chunk : x.chunks()) multiply(x, chunk, weight, y);
          return tensor_list{y};
        })[0]);
      }
      for (const RowChunk& chunk : x.chunks()) x.wait(chunk);
      return ys;
    }
    for (const at::Tensor& weight : weights) ys.push_back(buffer(weight));
    for (const RowChunk& chunk : x.chunks()) {
      for (std::size_t i = 0; i < weights.size(); ++i) multiply(x, chunk, weights[i], ys[i]);
    }
    return ys;
  }
};

struct MatmulReduceScatter : torch::autograd::Function<MatmulReduceScatter> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x_in, const at::Tensor& weight,
                            const ExchangePtr& exchange) {
    const at::Tensor x = as_rows(x_in);
    ctx->save_for_backward({x, weight});
    ctx->saved_data["whole"] = x_in.sizes().vec();
    save_exchange(*ctx, exchange);
    return kernels::computed_once(kernels::SavedOp::linear, [&] {
      const auto layout = RowLayout::of_whole(x_in.sizes(), exchange->dim, *exchange->group).of_width(weight.size(0));
      ChunkedReduceScatter y(layout, x.options().requires_grad(false), *exchange->group);
      for (const RowChunk& chunk : y.chunks()) {
        at::Tensor rows = y.buffer(chunk);
        at::mm_out(rows, rows_of(x, chunk), weight.t());
        y.send(chunk);
      }
      return tensor_list{y.finish()};
    })[0];
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const ExchangePtr exchange = saved_exchange(*ctx);
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const ChunkedAllGather dy(grads[0], exchange->dim, *exchange->group);
    at::Tensor dx;
    if (ctx->needs_input_grad(0)) dx = at::empty_like(x);
    for (const RowChunk& chunk : dy.chunks()) {
      const at::Tensor dy_rows = dy.wait(chunk);
      if (!dx.defined()) continue;
      at::Tensor rows = rows_of(dx, chunk);
      at::mm_out(rows, dy_rows, weight);
    }
    if (dx.defined()) dx = dx.view(ctx->saved_data.at("whole").toIntVector());
    return {dx, weight_product(*ctx, 1, weight, dy.rows(), x), at::Tensor()};
  }
};

struct OverlappedFeedForward : torch::autograd::Function<OverlappedFeedForward> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x_part, const at::Tensor& w1, const at::Tensor& w2,
                            const at::Tensor& w3, const ExchangePtr& exchange) {
    const ChunkedAllGather x(x_part, exchange->dim, *exchange->group);
    const GatesAndUps hidden(x.layout().rows(), w1.size(0), x.rows().options());
    const at::Tensor &gates = hidden.gates, &ups = hidden.ups;
    const at::Tensor products = at::empty(gates.sizes(), x.rows().options());
    const bool is_one = are_one_product({w1, w3});
    for (const RowChunk& chunk : x.chunks()) {
      const at::Tensor x_chunk = x.wait(chunk);
      in_blocks(chunk, x.rows(), [&](std::int64_t in_chunk, std::int64_t first, std::int64_t n) {
        const at::Tensor x_rows = x_chunk.narrow(0, in_chunk, n);
        at::Tensor gate = gates.narrow(0, first, n), up = ups.narrow(0, first, n);
        if (is_one) {
          at::Tensor both = hidden.both.narrow(0, first, n);
          at::mm_out(both, x_rows, kernels::stacked({w1, w3}).t());
        } else {
          at::mm_out(gate, x_rows, w1.t());
          at::mm_out(up, x_rows, w3.t());
        }
        kernels::swiglu_into(gate, up, products.narrow(0, first, n));
      });
    }
    ChunkedReduceScatter y(x.layout().of_width(w2.size(0)), gates.options(), *exchange->group);
    for (const RowChunk& chunk : y.chunks()) {
      at::Tensor rows = y.buffer(chunk);
      at::mm_out(rows, rows_of(products, chunk), w2.t());
      y.send(chunk);
    }
    ctx->save_for_backward({x.rows(), w1, w2, w3, gates, ups});
    ctx->saved_data["part"] = x_part.sizes().vec();
    save_exchange(*ctx, exchange);
    return y.finish();
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const ExchangePtr exchange = saved_exchange(*ctx);
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &w1 = saved[1], &w2 = saved[2], &w3 = saved[3], &gates = saved[4], &ups = saved[5];
    const ChunkedAllGather dy(grads[0], exchange->dim, *exchange->group);
    const GatesAndUps gradients(gates.size(0), gates.size(1), gates.options());
    const at::Tensor &dgates = gradients.gates, &dups = gradients.ups;
    const at::Tensor products = at::empty(gates.sizes(), gates.options());
    at::Tensor buffer;  // of the largest block so far
    for (const RowChunk& chunk : dy.chunks()) {
      const at::Tensor dy_chunk = dy.wait(chunk);
      in_blocks(chunk, gates, [&](std::int64_t in_chunk, std::int64_t first, std::int64_t n) {
        if (!buffer.defined() || buffer.size(0) < n) buffer = at::empty({n, gates.size(1)}, gates.options());
        at::Tensor dproduct = buffer.narrow(0, 0, n);
        at::mm_out(dproduct, dy_chunk.narrow(0, in_chunk, n), w2);
        const auto rows = [&](const at::Tensor& t) { return t.narrow(0, first, n); };
        kernels::swiglu_backward_into(rows(gates), rows(ups), dproduct, rows(dgates), rows(dups), rows(products));
      });
    }
    std::optional<ChunkedReduceScatter> dx;
    if (ctx->needs_input_grad(0)) {
      const auto part = ctx->saved_data.at("part").toIntVector();
      dx.emplace(RowLayout::of_part(part, exchange->dim, *exchange->group), x.options(), *exchange->group);
      for (const RowChunk& chunk : dx->chunks()) {
        at::Tensor rows = dx->buffer(chunk);
        if (are_one_product({w1, w3})) {
          at::mm_out(rows, rows_of(gradients.both, chunk), kernels::stacked({w1, w3}));
        } else {
          at::mm_out(rows, rows_of(dgates, chunk), w1);
          rows.addmm_(rows_of(dups, chunk), w3);
        }
        dx->send(chunk);
      }
    }
    const at::Tensor dw2 = weight_product(*ctx, 2, w2, dy.rows(), products);
    const tensor_list both = weight_products(*ctx, {1, 3}, {w1, w3}, {dgates, dups}, gradients.both, x);
    return {dx ? dx->finish() : at::Tensor(), both[0], dw2, both[1], at::Tensor()};
  }
};

class OverlappedCollectiveMatmul final : public nn::CollectiveMatmul {
 public:
  OverlappedCollectiveMatmul(std::shared_ptr<Communicator> group, std::int64_t dim)
      : exchange_(c10::make_intrusive<Exchange>(std::move(group), dim)) {}

  tensor_list all_gather_matmul(const at::Tensor& x, const tensor_list& weights) const override {
    tensor_list results;
    const at::Tensor input = cast(x);
    for (std::size_t i = 0; i < weights.size(); i += 3) {  // Function::apply() takes only single tensors
      const auto weight = [&](std::size_t at) {
        return at < weights.size() ? std::optional(like(input, weights[at])) : std::nullopt;
      };
      for (auto& y : AllGatherMatmul::apply(input, *weight(i), weight(i + 1), weight(i + 2), exchange_)) {
        results.push_back(std::move(y));
      }
    }
    return results;
  }
  at::Tensor matmul_reduce_scatter(const at::Tensor& x, const at::Tensor& weight) const override {
    const at::Tensor input = cast(x);
    return MatmulReduceScatter::apply(input, like(input, weight), exchange_);
  }
  at::Tensor feed_forward(const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w2,
                          const at::Tensor& w3) const override {
    const at::Tensor input = cast(x);
    return OverlappedFeedForward::apply(input, like(input, w1), like(input, w2), like(input, w3), exchange_);
  }
  at::Tensor gather(const at::Tensor& x) const override {
    return all_gather_along(x, exchange_->dim, exchange_->group);
  }
  at::Tensor scatter(const at::Tensor& y) const override {
    return reduce_scatter_along(y, exchange_->dim, exchange_->group);
  }

 private:
  // As autocast does in front of a product.
  static at::Tensor cast(const at::Tensor& x) {
    const auto device = x.device().type();
    const bool casts = at::autocast::is_autocast_enabled(device) && x.scalar_type() == at::kFloat;
    return casts ? x.to(at::autocast::get_autocast_dtype(device)) : x;
  }
  static at::Tensor like(const at::Tensor& x, const at::Tensor& weight) {
    return weight.scalar_type() == x.scalar_type() ? weight : weight.to(x.scalar_type());
  }

  ExchangePtr exchange_;
};

}  // namespace

std::shared_ptr<const nn::CollectiveMatmul> overlapped_collective_matmul(std::shared_ptr<Communicator> group,
                                                                         std::int64_t dim) {
  return std::make_shared<OverlappedCollectiveMatmul>(std::move(group), dim);
}

}  // namespace phalanx
