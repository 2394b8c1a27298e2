// Replaces cuda_streams.cc if libtorch is a CPU build.
#include <fmt/format.h>

#include "phalanx/base/error.h"
#include "phalanx/comm/device/device_streams.h"

namespace phalanx {
namespace {

[[noreturn]] void refuse_cuda(int device) {
  throw ConfigError(fmt::format(
      "cuda:{}: this libtorch is a CPU build; build against a CUDA build (-DPHALANX_TORCH_DIR=<its folder>)", device));
}

}  // namespace

std::shared_ptr<DeviceStreams> make_cuda_streams(int device) { refuse_cuda(device); }
void use_cuda_device(int device) { refuse_cuda(device); }
int cuda_device_count() noexcept { return 0; }
std::string cuda_device_name(int) { return ""; }
bool is_cuda_build() noexcept { return false; }

}  // namespace phalanx
