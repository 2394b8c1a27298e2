// The arithmetic of AdamW, SGD and Adadelta on plain float32 arrays: one pass over everything that belongs to an
// element.
//
// An element's new values depend on its old values alone, to the bit: not on where its array begins or ends, how it is
// aligned, how it is cut among threads or ranks, or which instruction set runs. Each operation is rounded by itself
// (nothing is contracted to a fused multiply-add), and vectors and single elements round alike: IEEE 754 says how +, *,
// / and the square root are rounded. libtorch's fused CPU kernels do not keep this: the elements past the last whole
// vector of a thread's part may differ in the last bit.
//
// Knows no torch. Pointers need the alignment of a float only; arrays must not overlap; a count of 0 is fine.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phalanx {

/// What is the same for all elements of a parameter in one step, in double until the end: see adamw.h for the formulas.
struct AdamWStep {
  AdamWStep(double lr, double beta1, double beta2, double eps, double weight_decay, double step);  // step: 1, 2, ...

  float decay;                 // lr * weight_decay
  float grad_weight;           // 1 - beta1
  float beta2, square_weight;  // square_weight: 1 - beta2
  float size;                  // lr / (1 - beta1^step)
  float inverse_correction;    // 1 / sqrt(1 - beta2^step)
  float eps;
};

void adamw_step(const AdamWStep& step, std::size_t count, const float* grad, float* parameter, float* exp_avg,
                float* exp_avg_sq);

struct SgdStep {
  float lr, momentum, weight_decay;
  bool nesterov;
};

/// momentum_buffer: nullptr without momentum.
void sgd_step(const SgdStep& step, std::size_t count, const float* grad, float* parameter, float* momentum_buffer);

struct AdadeltaStep {
  float lr, rho, square_weight, eps, weight_decay;  // square_weight: 1 - rho
};

void adadelta_step(const AdadeltaStep& step, std::size_t count, const float* grad, float* parameter, float* square_avg,
                   float* acc_delta);

}  // namespace phalanx
