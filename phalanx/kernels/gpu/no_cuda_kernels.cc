// In place of cuda_kernels.cu in a build without nvcc.
#include "phalanx/kernels/gpu/gpu_kernels.h"

namespace phalanx::kernels::gpu {

const GpuKernels* cuda_kernels() { return nullptr; }
int cuda_capability(int /*device*/) { return 0; }

}  // namespace phalanx::kernels::gpu
