#include "phalanx/nn/norm.h"

#include "phalanx/nn/layer_norm.h"
#include "phalanx/nn/rms_norm.h"

namespace phalanx::nn {

std::shared_ptr<Norm> make_norm(NormKind kind, std::int64_t dim, double eps, TensorOptionsOfModule tensor) {
  if (kind == NormKind::layer) return std::make_shared<LayerNorm>(dim, eps, tensor);
  return std::make_shared<RMSNorm>(dim, eps, tensor, /*adds_one=*/kind == NormKind::rms_one_plus);
}

}  // namespace phalanx::nn
