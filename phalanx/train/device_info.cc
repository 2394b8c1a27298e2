#include "phalanx/train/device_info.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>

#include "phalanx/base/process_stats.h"
#include "phalanx/comm/device/device_streams.h"
#include "phalanx/report/log_line.h"

namespace phalanx::train {
namespace {

// The text after "key   :" in the first line that starts with key, in files such as /proc/cpuinfo.
std::string field_of(const std::filesystem::path& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(':');
    if (!line.starts_with(key) || colon == std::string::npos) continue;
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

double measured_matmul_tflops() {
  constexpr std::int64_t kSize = 768;
  const at::NoGradGuard no_grad;
  const at::Tensor a = at::full({kSize, kSize}, 0.5, at::TensorOptions(at::kFloat));
  double best_seconds = 1e9;
  // The first few products are slow: cold caches, a clock that has to rise. About a tenth of a second in all.
  for (int repeat = 0; repeat < 12; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    const at::Tensor product = at::mm(a, a);
    best_seconds =
        std::min(best_seconds, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return 2.0 * kSize * kSize * kSize / best_seconds / 1e12;
}

}  // namespace

std::uint64_t host_memory_bytes() {
  std::uint64_t bytes = 0;
  try {
    bytes = std::stoull(field_of("/proc/meminfo", "MemTotal")) * 1024;
    for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
      std::uint64_t limit = 0;
      if (std::ifstream(path) >> limit && limit > 0) bytes = std::min(bytes, limit);  // "max" does not parse
    }
  } catch (const std::exception&) {
    // Without /proc there is no total; the percentage is then left at zero.
  }
  return bytes;
}

DeviceInfo describe_device(c10::Device device) {
  if (!device.is_cpu()) {
    at::globalContext().lazyInitDevice(device.type());  // an allocator that was never used knows no device
    const auto [free_bytes, total_bytes] = c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index());
    (void)free_bytes;
    return {device.is_cuda() ? cuda_device_name(device.index()) : device.str(), total_bytes};
  }
  const std::string name = field_of("/proc/cpuinfo", "model name");
  return {name.empty() ? "CPU" : name, host_memory_bytes()};
}

std::uint64_t peak_device_bytes(c10::Device device) {
  if (device.is_cpu()) return peak_resident_bytes();
  at::globalContext().lazyInitDevice(device.type());
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return static_cast<std::uint64_t>(stats.reserved_bytes[kAll].peak);
}

std::optional<double> device_peak_tflops(c10::Device device, const std::string& name) {
  if (!device.is_cpu()) return report::gpu_peak_tflops(name);
  return measured_matmul_tflops();
}

}  // namespace phalanx::train
