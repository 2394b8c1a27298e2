// ATen's attention over sequences of various lengths, which only CUDA has: flash attention in 16 bits and
// memory-efficient attention in float32, with the checks of their CUDA kernels. The CPU's flash attention computes each
// sequence. They are boxed, as libtorch's versions have different numbers of arguments.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "phalanx/testing/sim_device/torch/dense_attention.h"
#include "phalanx/testing/sim_device/torch/kernel_tensors.h"
#include "phalanx/testing/sim_device/torch/native_operators.h"

namespace phalanx::sim_device {
namespace {

using at::Tensor;
using Stack = torch::jit::Stack;

/// Sequence `number` is tokens [first, first + count).
struct Sequence {
  std::int64_t number, first, count;
};

/// What both kernels have: tokens [tokens, heads, head_dim].
struct Problem {
  Tensor q, k, v, lengths;  // int32 [sequences + 1]: cumulative
  std::int64_t longest = 0;
  std::optional<double> scale;
  std::int64_t window = 0;  // 0: none

  std::int64_t tokens() const { return q.size(0); }
  std::int64_t heads() const { return q.size(1); }
  std::int64_t sequences() const { return lengths.size(0) - 1; }

  template <class Use>
  void for_each_sequence(const Use& use) const {
    const auto* ends = lengths.const_data_ptr<std::int32_t>();
    TORCH_CHECK(ends[0] == 0 && ends[sequences()] == tokens(), "sim: cumulative lengths from ", ends[0], " to ",
                ends[sequences()], " of ", tokens(), " tokens");
    for (std::int64_t i = 0; i < sequences(); ++i) {
      TORCH_CHECK(ends[i + 1] - ends[i] <= longest, "sim: a sequence of ", ends[i + 1] - ends[i],
                  " tokens, and max_seqlen is ", longest);
      use(Sequence{i, ends[i], ends[i + 1] - ends[i]});
    }
  }
  /// Of -infinity where a query may not see a key beyond causality; nothing without a window.
  std::optional<Tensor> mask(std::int64_t count) const {
    if (window == 0 || window >= count) return std::nullopt;
    const Tensor at = at::arange(count);
    const Tensor distance = at.unsqueeze(1) - at;
    return at::zeros({count, count}, q.options())
        .masked_fill((distance < 0).logical_or(distance >= window), -std::numeric_limits<double>::infinity());
  }
};

/// [1, heads, count, head_dim] of a sequence.
Tensor part(const Tensor& tokens, const Sequence& sequence) {
  return tokens.narrow(0, sequence.first, sequence.count).transpose(0, 1).unsqueeze(0);
}

/// `log_sum_of(sequence)`: float32 [1, heads, count].
template <class LogSumOf>
void attend(const Problem& problem, const Tensor& y, const LogSumOf& log_sum_of) {
  problem.for_each_sequence([&](const Sequence& one) {
    const auto mask = problem.mask(one.count);
    const auto [out, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
        part(problem.q, one), part(problem.k, one), part(problem.v, one), /*dropout_p=*/0.0,
        /*is_causal=*/!mask.has_value(), mask, problem.scale);
    part(y, one).copy_(out);
    if (Tensor to = log_sum_of(one); to.defined()) to.copy_(log_sum);
  });
}

template <class LogSumOf>
void attend_backward(const Problem& problem, const Tensor& grad, const Tensor& y, const std::vector<Tensor>& grads,
                     const LogSumOf& log_sum_of) {
  problem.for_each_sequence([&](const Sequence& one) {
    const auto mask = problem.mask(one.count);
    const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        part(grad, one), part(problem.q, one), part(problem.k, one), part(problem.v, one), part(y, one),
        log_sum_of(one), /*dropout_p=*/0.0, /*is_causal=*/!mask.has_value(), mask, problem.scale);
    part(grads[0], one).copy_(dq);
    part(grads[1], one).copy_(dk);
    part(grads[2], one).copy_(dv);
  });
}

void check(const Problem& problem, bool is_16_bits) {
  const auto type = problem.q.scalar_type();
  const bool fits = is_16_bits ? type == at::kHalf || type == at::kBFloat16 : type == at::kFloat;
  TORCH_CHECK(fits, "sim: attention of this kind does not take ", type);
  const std::int64_t multiple = is_16_bits ? 8 : 4;
  for (const Tensor& t : {problem.q, problem.k, problem.v}) {
    TORCH_CHECK(t.dim() == 3 && t.stride(2) == 1 && t.scalar_type() == type && t.size(2) % multiple == 0 &&
                    t.size(2) <= (is_16_bits ? 256 : 1024) && t.size(0) == problem.tokens() &&
                    problem.heads() % t.size(1) == 0,
                "sim: attention over lengths takes no ", t.scalar_type(), " of shape ", t.sizes(), " and strides ",
                t.strides());
  }
  TORCH_CHECK(
      problem.lengths.scalar_type() == at::kInt && problem.lengths.is_contiguous() && is_on_sim(problem.lengths),
      "sim: cumulative lengths are contiguous int32 on the device");
}

Problem on_host(const Problem& problem) {
  Problem views = problem;
  for (Tensor* t : {&views.q, &views.k, &views.v, &views.lengths}) *t = kernel_view(*t);
  return views;
}

std::vector<Access> reads_of(const Problem& problem) {
  std::vector<Access> accesses;
  for (const Tensor& t : {problem.q, problem.k, problem.v, problem.lengths}) add_accesses(accesses, t, false);
  return accesses;
}

Tensor empty_like_tokens(const Tensor& t) {
  return empty_on_sim({t.size(0), t.size(1), t.size(2)}, {t.size(1) * t.size(2), t.size(2), 1}, t.scalar_type());
}

std::vector<Tensor> launch_backward(const char* name, const Problem& problem, const Tensor& grad, const Tensor& y,
                                    const Tensor& log_sums,
                                    const std::function<Tensor(const Tensor&, const Sequence&)>& log_sum_of) {
  std::vector<Tensor> grads = {empty_like_tokens(problem.q), empty_like_tokens(problem.k),
                               empty_like_tokens(problem.v)};
  std::vector<Access> accesses = reads_of(problem);
  for (const Tensor& t : {grad, y, log_sums}) add_accesses(accesses, t, false);
  std::vector<Tensor> views;
  for (const Tensor& t : grads) {
    add_accesses(accesses, t, true);
    views.push_back(kernel_view(t));
  }
  launch(problem.q.device().index(), name, std::move(accesses),
         [host = on_host(problem), grad = kernel_view(grad), y = kernel_view(y), views = std::move(views),
          log_sums = kernel_view(log_sums), log_sum_of] {
           attend_backward(host, grad, y, views, [&](const Sequence& one) { return log_sum_of(log_sums, one); });
         });
  return grads;
}

std::optional<double> optional_double(const c10::IValue& value) {
  return value.isNone() ? std::nullopt : std::optional(value.toDouble());
}

/// Its log-sum-exp is [heads, tokens].
Tensor flash_log_sum(const Tensor& log_sums, const Sequence& one) {
  return log_sums.narrow(1, one.first, one.count).unsqueeze(0);
}

/// Of q, k, v ...: what precedes the lengths differs between forward and backward.
Problem flash_problem(const Stack& a, std::size_t tensors, std::size_t lengths, std::size_t scale) {
  TORCH_CHECK(a[lengths + 4].toDouble() == 0 && a[lengths + 5].toBool(),
              "sim: flash attention without dropout, causal");
  Problem problem{.q = a[tensors].toTensor(),
                  .k = a[tensors + 1].toTensor(),
                  .v = a[tensors + 2].toTensor(),
                  .lengths = a[lengths].toTensor(),
                  .longest = a[lengths + 2].toInt(),
                  .scale = optional_double(a[scale])};
  if (!a[scale + 1].isNone() && a[scale + 1].toInt() >= 0) problem.window = a[scale + 1].toInt() + 1;
  return problem;
}

/// One query a row over the keys of a cache: rows of unequal lengths, joined, where `seen` says how many keys count.
struct CachedProblem {
  Tensor q, k, v, first_query, first_keys, seen;
  std::int64_t longest = 0;
  std::int64_t window = 0;  // 0: none

  std::int64_t rows() const { return q.size(0); }

  void check() const {
    const auto type = q.scalar_type();
    for (const Tensor& t : {q, k, v}) {
      TORCH_CHECK((type == at::kHalf || type == at::kBFloat16) && t.scalar_type() == type && t.dim() == 3 &&
                      t.stride(-1) == 1 && t.size(-1) % 8 == 0 && t.size(-1) <= 256 && q.size(-2) % t.size(-2) == 0,
                  "sim: attention over a cache takes no ", t.scalar_type(), " of shape ", t.sizes(), " and strides ",
                  t.strides());
    }
    for (const Tensor& t : {first_query, first_keys, seen}) {
      TORCH_CHECK(t.scalar_type() == at::kInt && t.is_contiguous() && is_on_sim(t) &&
                      t.size(0) == rows() + (t.is_same(seen) ? 0 : 1),
                  "sim: lengths of a cache are contiguous int32 on the device, one for each row");
    }
  }
  CachedProblem on_host() const {
    CachedProblem views = *this;
    for (Tensor* t : {&views.q, &views.k, &views.v, &views.first_query, &views.first_keys, &views.seen}) {
      *t = kernel_view(*t);
    }
    return views;
  }
  std::vector<Access> reads() const {
    std::vector<Access> accesses;
    for (const Tensor& t : {q, k, v, first_query, first_keys, seen}) add_accesses(accesses, t, false);
    return accesses;
  }
  /// On the host.
  void run(const Tensor& y, const Tensor& log_sums) const {
    for (std::int64_t row = 0; row < rows(); ++row) {
      std::int64_t first = first_keys.const_data_ptr<std::int32_t>()[row];
      std::int64_t count = seen.const_data_ptr<std::int32_t>()[row];
      TORCH_CHECK(first_query.const_data_ptr<std::int32_t>()[row] == row, "sim: one query in each row");
      TORCH_CHECK(count >= 1 && count <= longest && first + count <= k.size(0), "sim: row ", row, " sees ", count,
                  " keys from ", first, " on of ", k.size(0), ", and at most ", longest);
      if (window > 0 && window < count) first += count - window, count = window;
      const auto keys = [&](const Tensor& t) { return t.narrow(0, first, count).transpose(0, 1).unsqueeze(0); };
      const Tensor query = q.select(0, row).unsqueeze(1).unsqueeze(0);
      const auto [out, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(query, keys(k), keys(v));
      y.select(0, row).copy_(out.squeeze(0).squeeze(1));
      log_sums.select(1, row).copy_(log_sum.flatten());
    }
  }
};

void cached_forward(const Stack& a, Stack* stack) {
  TORCH_CHECK(a[7].toDouble() == 0 && a[10].isNone(), "sim: attention over a cache has no dropout and no scale");
  CachedProblem problem{.q = a[0].toTensor(),
                        .k = a[1].toTensor(),
                        .v = a[2].toTensor(),
                        .first_query = a[3].toTensor(),
                        .first_keys = a[4].toTensor(),
                        .seen = a[13].toTensor(),
                        .longest = a[6].toInt()};
  if (!a[11].isNone() && a[11].toInt() >= 0) problem.window = a[11].toInt() + 1;
  problem.check();
  const Tensor y =
      empty_on_sim(problem.q.sizes(), at::empty(problem.q.sizes(), at::kMeta).strides(), problem.q.scalar_type());
  const std::int64_t heads = problem.q.size(-2);
  const Tensor log_sums = empty_on_sim({heads, problem.rows()}, {problem.rows(), 1}, at::kFloat);
  std::vector<Access> accesses = problem.reads();
  for (const Tensor& t : {y, log_sums}) add_accesses(accesses, t, true);
  launch(problem.q.device().index(), "aten::_flash_attention_forward", std::move(accesses),
         [host = problem.on_host(), y = kernel_view(y), log_sums = kernel_view(log_sums)] { host.run(y, log_sums); });
  for (const Tensor& result : {y, log_sums, Tensor(), Tensor(), Tensor()}) stack->emplace_back(result);
}

bool is_defined(const c10::IValue& value) { return !value.isNone() && value.toTensor().defined(); }
std::optional<std::int64_t> optional_int(const c10::IValue& value) {
  return value.isNone() ? std::nullopt : std::optional(value.toInt());
}

/// Of q, k, v ..., without lengths. `is_causal` is followed by what precedes the scale.
DenseProblem dense_flash_problem(const Stack& a, std::size_t tensors, std::size_t lengths, std::size_t scale) {
  TORCH_CHECK(a[lengths + 4].toDouble() == 0, "sim: flash attention without dropout");
  TORCH_CHECK(a[lengths + 2].toInt() == a[tensors].toTensor().size(1) &&
                  a[lengths + 3].toInt() == a[tensors + 1].toTensor().size(1),
              "sim: max_q and max_k are those of the tensors");
  DenseProblem problem{.q = a[tensors].toTensor(),
                       .k = a[tensors + 1].toTensor(),
                       .v = a[tensors + 2].toTensor(),
                       .is_causal = a[lengths + 5].toBool(),
                       .left = optional_int(a[scale + 1]),
                       .right = optional_int(a[scale + 2]),
                       .scale = optional_double(a[scale])};
  problem.check(/*is_16_bits=*/true);
  return problem;
}

void flash_forward(const c10::OperatorHandle& op, Stack* stack) {
  const Stack a = torch::jit::pop(*stack, op.schema().arguments().size());
  if (!is_defined(a[3])) {
    const DenseResult result = dense_attention("aten::_flash_attention_forward", dense_flash_problem(a, 0, 3, 10), 1);
    for (const Tensor& one : {result.y, result.log_sums, Tensor(), Tensor(), Tensor()}) stack->emplace_back(one);
    return;
  }
  if (!a[8].toBool()) return cached_forward(a, stack);
  const Problem problem = flash_problem(a, 0, 3, 10);
  check(problem, /*is_16_bits=*/true);
  const Tensor y = empty_like_tokens(problem.q);
  const Tensor log_sums = empty_on_sim({problem.heads(), problem.tokens()}, {problem.tokens(), 1}, at::kFloat);
  std::vector<Access> accesses = reads_of(problem);
  add_accesses(accesses, y, true);
  add_accesses(accesses, log_sums, true);
  launch(problem.q.device().index(), "aten::_flash_attention_forward", std::move(accesses),
         [host = on_host(problem), y = kernel_view(y), log_sums = kernel_view(log_sums)] {
           attend(host, y, [&](const Sequence& one) { return flash_log_sum(log_sums, one); });
         });
  for (const Tensor& result : {y, log_sums, Tensor(), Tensor(), Tensor()}) stack->emplace_back(result);
}

void flash_backward(const c10::OperatorHandle& op, Stack* stack) {
  const Stack a = torch::jit::pop(*stack, op.schema().arguments().size());
  if (!is_defined(a[6])) {
    const auto grads = dense_attention_backward("aten::_flash_attention_backward", dense_flash_problem(a, 1, 6, 14),
                                                a[0].toTensor(), {a[4].toTensor(), a[5].toTensor()});
    for (const Tensor& one : grads) stack->emplace_back(one);
    return;
  }
  const Problem problem = flash_problem(a, 1, 6, 14);
  check(problem, /*is_16_bits=*/true);
  const auto grads = launch_backward("aten::_flash_attention_backward", problem, a[0].toTensor(), a[4].toTensor(),
                                     a[5].toTensor(), flash_log_sum);
  for (const Tensor& one : grads) stack->emplace_back(one);
}

/// Its log-sum-exp is [sequences, heads, longest], rounded up to 32.
Tensor efficient_log_sum(const Tensor& log_sums, const Sequence& one) {
  return log_sums.select(0, one.number).narrow(1, 0, one.count).unsqueeze(0);
}

Problem efficient_problem(const Stack& a, std::size_t tensors, std::size_t lengths, std::size_t longest,
                          std::size_t scale) {
  constexpr std::int64_t kOnlyBatch = 1;
  for (std::size_t i = tensors; i < tensors + 3; ++i) {
    TORCH_CHECK(a[i].toTensor().size(0) == kOnlyBatch, "sim: with cumulative lengths a batch of one");
    TORCH_CHECK(a[i].toTensor().size(2) == a[tensors].toTensor().size(2), "sim: as many heads of keys as of queries");
  }
  TORCH_CHECK(a[tensors + 3].isNone() || !a[tensors + 3].toTensor().defined(), "sim: no bias");
  return {.q = a[tensors].toTensor().squeeze(0),
          .k = a[tensors + 1].toTensor().squeeze(0),
          .v = a[tensors + 2].toTensor().squeeze(0),
          .lengths = a[lengths].toTensor(),
          .longest = a[longest].toInt(),
          .scale = optional_double(a[scale])};
}

/// Without lengths.
DenseProblem dense_efficient_problem(const Stack& a, std::size_t tensors, std::size_t mask_type, std::size_t scale) {
  DenseProblem problem{.q = a[tensors].toTensor(),
                       .k = a[tensors + 1].toTensor(),
                       .v = a[tensors + 2].toTensor(),
                       .is_causal = a[mask_type].toInt() == 1,
                       .scale = optional_double(a[scale])};
  problem.check(/*is_16_bits=*/false);
  TORCH_CHECK(!is_defined(a[tensors + 3]), "sim: no bias");
  TORCH_CHECK(problem.q.size(2) == problem.k.size(2), "sim: as many heads of keys as of queries");
  TORCH_CHECK(a[mask_type].toInt() == 0 || problem.q.size(1) == problem.k.size(1),
              "sim: causal from the top left, with as many queries as keys");
  return problem;
}

void efficient_forward(const c10::OperatorHandle& op, Stack* stack) {
  const Stack a = torch::jit::pop(*stack, op.schema().arguments().size());
  if (!is_defined(a[4])) {
    TORCH_CHECK(a[8].toDouble() == 0 && a[10].toBool(), "sim: no dropout, with log-sum-exps");
    const DenseProblem problem = dense_efficient_problem(a, 0, 9, 11);
    const DenseResult result = dense_attention("aten::_efficient_attention_forward", problem, 32);
    for (const Tensor& one : {result.y, result.log_sums, Tensor(), Tensor()}) stack->emplace_back(one);
    stack->emplace_back(problem.q.size(1));
    stack->emplace_back(problem.k.size(1));
    return;
  }
  const Problem problem = efficient_problem(a, 0, 4, 6, 11);
  TORCH_CHECK(a[8].toDouble() == 0 && a[9].toInt() == 1, "sim: no dropout, causal from the top left");
  check(problem, /*is_16_bits=*/false);
  const Tensor y = empty_like_tokens(problem.q);
  const std::int64_t width = a[10].toBool() ? (problem.longest + 31) / 32 * 32 : 0;
  const Tensor log_sums =
      empty_on_sim({problem.sequences(), problem.heads(), width}, {problem.heads() * width, width, 1}, at::kFloat);
  std::vector<Access> accesses = reads_of(problem);
  add_accesses(accesses, y, true);
  add_accesses(accesses, log_sums, true);
  launch(problem.q.device().index(), "aten::_efficient_attention_forward", std::move(accesses),
         [host = on_host(problem), y = kernel_view(y), log_sums = kernel_view(log_sums), width] {
           attend(host, y,
                  [&](const Sequence& one) { return width > 0 ? efficient_log_sum(log_sums, one) : Tensor(); });
         });
  for (const Tensor& result : {y.unsqueeze(0), log_sums, Tensor(), Tensor()}) stack->emplace_back(result);
  stack->emplace_back(problem.longest);
  stack->emplace_back(problem.longest);
}

void efficient_backward(const c10::OperatorHandle& op, Stack* stack) {
  const Stack a = torch::jit::pop(*stack, op.schema().arguments().size());
  if (!is_defined(a[6])) {
    TORCH_CHECK(a[11].toDouble() == 0 && a[10].toTensor().size(2) % 32 == 0,
                "sim: no dropout, and log-sum-exps of a multiple of 32 queries");
    const auto grads =
        dense_attention_backward("aten::_efficient_attention_backward", dense_efficient_problem(a, 1, 14, 16),
                                 a[0].toTensor(), {a[5].toTensor(), a[10].toTensor()});
    for (const Tensor& one : grads) stack->emplace_back(one);
    stack->emplace_back(Tensor());
    return;
  }
  const Problem problem = efficient_problem(a, 1, 6, 8, 16);
  check(problem, /*is_16_bits=*/false);
  const auto grads = launch_backward("aten::_efficient_attention_backward", problem, a[0].toTensor().squeeze(0),
                                     a[5].toTensor().squeeze(0), a[10].toTensor(), efficient_log_sum);
  for (const Tensor& one : grads) stack->emplace_back(one.unsqueeze(0));
  stack->emplace_back(Tensor());
}

}  // namespace

void register_variable_length_attention(torch::Library& library) {
  using torch::CppFunction;
  library.impl("_flash_attention_forward", CppFunction::makeFromBoxedFunction<&flash_forward>());
  library.impl("_flash_attention_backward", CppFunction::makeFromBoxedFunction<&flash_backward>());
  library.impl("_efficient_attention_forward", CppFunction::makeFromBoxedFunction<&efficient_forward>());
  library.impl("_efficient_attention_backward", CppFunction::makeFromBoxedFunction<&efficient_backward>());
}

}  // namespace phalanx::sim_device
