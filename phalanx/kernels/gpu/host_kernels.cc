// Compiled without contraction to fused multiply-adds, as the CUDA kernels are, so that both have the same bits.
#include "phalanx/kernels/gpu/host_block.h"
#include "phalanx/kernels/gpu/kernels_body.h"

namespace phalanx::kernels::gpu {
namespace {

struct HostLauncher {
  template <class Body>
  static const char* run(void* /*stream*/, std::int64_t blocks, int blocks_y, int lanes, const Body& body) {
    for (int y = 0; y < blocks_y; ++y) {
      for (std::int64_t index = 0; index < blocks; ++index) {
        HostBlock block(index, y, lanes);
        body(block);
      }
    }
    return nullptr;
  }
};

}  // namespace

std::int64_t rms_norm_backward_blocks(std::int64_t rows, std::int64_t dim) {
  // Four blocks of 2048 columns for each of the 132 multiprocessors of an H100, but at least four rows a block.
  std::int64_t most = 528;
  for (std::int64_t columns = 1024; columns >= 64 && columns >= dim; columns /= 2) most *= 2;
  const std::int64_t blocks = divide_up(rows, 4);
  return blocks < 1 ? 1 : blocks < most ? blocks : most;
}

std::int64_t squares_blocks(int count, const ConstTensor* tensors) {
  std::int64_t blocks = 0;
  for (int t = 0; t < count; ++t) blocks += Squares<float>::List::blocks_of(tensors[t].count);
  return blocks;
}

const GpuKernels& host_kernels() {
  static constexpr GpuKernels kernels = Kernels<HostLauncher>::table("host");
  return kernels;
}

}  // namespace phalanx::kernels::gpu
