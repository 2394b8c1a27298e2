// Compiled with -ffp-contract=off (see the header) and -fno-math-errno, without which no loop with a square root
// becomes a vector loop.
#include "phalanx/optim/step_kernels.h"

#include <cmath>

#include "phalanx/optim/instruction_sets.h"

namespace phalanx {

namespace {

// The arrays are read from memory, tile by tile, and prefetched this far ahead: a processor's own prefetching stops at
// every page of every array.
constexpr std::size_t kTile = 64, kAhead = 256, kCacheLine = 16;  // elements

}  // namespace

AdamWStep::AdamWStep(double lr, double beta1, double beta2, double eps, double weight_decay, double step)
    : decay(static_cast<float>(lr * weight_decay)),
      grad_weight(static_cast<float>(1 - beta1)),
      beta2(static_cast<float>(beta2)),
      square_weight(static_cast<float>(1 - beta2)),
      size(static_cast<float>(lr / (1 - std::pow(beta1, step)))),
      inverse_correction(static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, step)))),
      eps(static_cast<float>(eps)) {}

PHALANX_INSTRUCTION_SETS
void adamw_step(const AdamWStep& step, std::size_t count, const float* __restrict grad, float* __restrict parameter,
                float* __restrict exp_avg, float* __restrict exp_avg_sq) {
  const AdamWStep s = step;  // a copy: the writes below cannot change it
  for (std::size_t begin = 0; begin < count; begin += kTile) {
    const std::size_t end = count - begin < kTile ? count : begin + kTile;
    for (std::size_t i = begin + kAhead; i < begin + kAhead + kTile && i < count; i += kCacheLine) {
      __builtin_prefetch(grad + i, 0);
      __builtin_prefetch(parameter + i, 1);
      __builtin_prefetch(exp_avg + i, 1);
      __builtin_prefetch(exp_avg_sq + i, 1);
    }
    for (std::size_t i = begin; i < end; ++i) {
      const float g = grad[i];
      const float p = parameter[i] - s.decay * parameter[i];
      const float m = exp_avg[i] + s.grad_weight * (g - exp_avg[i]);
      const float v = s.beta2 * exp_avg_sq[i] + s.square_weight * g * g;
      exp_avg[i] = m;
      exp_avg_sq[i] = v;
      parameter[i] = p - s.size * m / (std::sqrt(v) * s.inverse_correction + s.eps);
    }
  }
}

PHALANX_INSTRUCTION_SETS
void sgd_step(const SgdStep& step, std::size_t count, const float* __restrict grad, float* __restrict parameter,
              float* __restrict momentum_buffer) {
  const SgdStep s = step;
  for (std::size_t begin = 0; begin < count; begin += kTile) {
    const std::size_t end = count - begin < kTile ? count : begin + kTile;
    for (std::size_t i = begin + kAhead; i < begin + kAhead + kTile && i < count; i += kCacheLine) {
      __builtin_prefetch(grad + i, 0);
      __builtin_prefetch(parameter + i, 1);
      if (momentum_buffer != nullptr) __builtin_prefetch(momentum_buffer + i, 1);
    }
    if (momentum_buffer == nullptr) {
      for (std::size_t i = begin; i < end; ++i) {
        const float p = parameter[i];
        parameter[i] = p - s.lr * (grad[i] + s.weight_decay * p);
      }
    } else {
      for (std::size_t i = begin; i < end; ++i) {
        const float p = parameter[i];
        const float g = grad[i] + s.weight_decay * p;
        const float b = s.momentum * momentum_buffer[i] + g;
        momentum_buffer[i] = b;
        parameter[i] = p - s.lr * (s.nesterov ? g + s.momentum * b : b);
      }
    }
  }
}

PHALANX_INSTRUCTION_SETS
void lion_step(const LionStep& step, std::size_t count, const float* __restrict grad, float* __restrict parameter,
               float* __restrict exp_avg) {
  const LionStep s = step;
  for (std::size_t i = 0; i < count; ++i) {
    const float g = grad[i], m = exp_avg[i];
    const float mean = m + s.grad_weight * (g - m);
    const float kept = parameter[i] - s.decay * parameter[i];
    parameter[i] = kept - (mean > 0 ? s.lr : mean < 0 ? -s.lr : mean);  // 0 and NaN are their own signs
    exp_avg[i] = m + s.momentum_weight * (g - m);
  }
}

PHALANX_INSTRUCTION_SETS
void adadelta_step(const AdadeltaStep& step, std::size_t count, const float* __restrict grad,
                   float* __restrict parameter, float* __restrict square_avg, float* __restrict acc_delta) {
  const AdadeltaStep s = step;
  for (std::size_t i = 0; i < count; ++i) {
    const float p = parameter[i];
    const float g = grad[i] + s.weight_decay * p;
    const float v = s.rho * square_avg[i] + s.square_weight * g * g;
    const float d = std::sqrt(acc_delta[i] + s.eps) / std::sqrt(v + s.eps) * g;
    square_avg[i] = v;
    acc_delta[i] = s.rho * acc_delta[i] + s.square_weight * d * d;
    parameter[i] = p - s.lr * d;
  }
}

// torch's lerp: from the nearer end, so that a weight of 1 gives the end itself.
PHALANX_INSTRUCTION_SETS
void muon_momentum(const MuonMomentum& step, std::size_t count, const float* __restrict grad,
                   float* __restrict momentum_buffer, float* __restrict update) {
  const MuonMomentum s = step;
  const bool near_buffer = s.grad_weight < 0.5F, near_grad = s.momentum < 0.5F;
  const float to_grad = near_buffer ? s.grad_weight : s.grad_weight - 1;
  const float to_buffer = near_grad ? s.momentum : s.momentum - 1;
  for (std::size_t i = 0; i < count; ++i) {
    const float g = grad[i], b = momentum_buffer[i];
    const float mean = (near_buffer ? b : g) + to_grad * (g - b);
    momentum_buffer[i] = mean;
    update[i] = s.nesterov ? (near_grad ? g : mean) + to_buffer * (mean - g) : mean;
  }
}

PHALANX_INSTRUCTION_SETS
void muon_step(const MuonStep& step, std::size_t count, const float* __restrict update, float* __restrict parameter) {
  const MuonStep s = step;
  for (std::size_t i = 0; i < count; ++i) parameter[i] = parameter[i] * s.kept - s.size * update[i];
}

PHALANX_INSTRUCTION_SETS
void average_step(float weight, std::size_t count, const float* __restrict parameter, float* __restrict average) {
  for (std::size_t i = 0; i < count; ++i) average[i] = average[i] + weight * (parameter[i] - average[i]);
}

}  // namespace phalanx
