// The arithmetic of AdamW, SGD, Lion, Adadelta and Muon on plain float32 arrays:
// one pass over all values that belong to an element.
//
// An element's new values depend only on its old values, to the bit. They do not depend on where its array begins or
// ends, how it is aligned, how it is split among threads or ranks, or which instruction set runs. Each operation is
// rounded by itself (nothing is contracted to a fused multiply-add), and vectors and single elements round alike: IEEE
// 754 defines the rounding of +, *, / and the square root. libtorch's fused CPU kernels do not guarantee this: the
// elements past the last whole vector of a thread's part may differ in the last bit.
//
// Torch-free.
// REQUIRES: pointers have at least the alignment of a float, and arrays do not overlap. A count of 0 is fine.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phalanx {

/// The values that are the same for all elements of a parameter in one step, computed in double. adamw.h has the
/// formulas.
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

struct LionStep {
  float lr, decay;                     // decay: lr * weight_decay
  float grad_weight, momentum_weight;  // 1 - beta1, 1 - beta2
};

void lion_step(const LionStep& step, std::size_t count, const float* grad, float* parameter, float* exp_avg);

struct AdadeltaStep {
  float lr, rho, square_weight, eps, weight_decay;  // square_weight: 1 - rho
};

void adadelta_step(const AdadeltaStep& step, std::size_t count, const float* grad, float* parameter, float* square_avg,
                   float* acc_delta);

struct MuonMomentum {
  float grad_weight, momentum;  // of the two linear interpolations; grad_weight: 1 - momentum
  bool nesterov;
};

/// momentum_buffer <- lerp(momentum_buffer, grad, grad_weight); update <- what is to be orthogonalised: muon.h.
void muon_momentum(const MuonMomentum& step, std::size_t count, const float* grad, float* momentum_buffer,
                   float* update);

struct MuonStep {
  float kept, size;  // kept: 1 - lr * weight_decay; size: the adjusted rate
};

void muon_step(const MuonStep& step, std::size_t count, const float* update, float* parameter);

/// average <- average + weight * (parameter - average).
void average_step(float weight, std::size_t count, const float* parameter, float* average);

}  // namespace phalanx
