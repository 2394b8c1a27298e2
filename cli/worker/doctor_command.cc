#include "cli/worker/doctor_command.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gnu/libc-version.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <torch/version.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "cli/parse_options.h"
#include "phalanx/base/cpu.h"
#include "phalanx/base/error.h"
#include "phalanx/base/human.h"
#include "phalanx/comm/backends/mpi/mpi.h"
#include "phalanx/comm/backends/nccl/nccl_table.h"
#include "phalanx/comm/device/device_streams.h"
#include "phalanx/train/device_info.h"

namespace phalanx::cli {

const std::string_view kDoctorHelp = R"(usage: phalanx doctor [--topology [--no-measure]]

Says what this node and this build have, line by line, and what is missing with what to do about it. Ends with status
1 if something that training needs is missing.

  --topology      instead: processors, caches, NUMA nodes, network devices, GPUs and their links, and the measured speed
                  of each level of memory and of the links between processes and to GPUs (some 2 seconds)
  --no-measure    the facts only
)";

namespace {

struct Examination {
  int missing = 0;

  void good(const char* what, const std::string& found) { fmt::print("  ok       {:<16} {}\n", what, found); }
  void note(const char* what, const std::string& found, const std::string& advice) {
    fmt::print("  note     {:<16} {}\n{:28}-> {}\n", what, found, "", advice);
  }
  void lacks(const char* what, const std::string& found, const std::string& advice) {
    fmt::print("  MISSING  {:<16} {}\n{:28}-> {}\n", what, found, "", advice);
    ++missing;
  }
};

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string cpu_features() {
  std::string features;
#if defined(__x86_64__)
  const auto add = [&](bool has, const char* name) {
    if (has) features += fmt::format("{}{}", features.empty() ? "" : ", ", name);
  };
  add(__builtin_cpu_supports("avx2"), "AVX2");
  add(__builtin_cpu_supports("fma"), "FMA");
  add(__builtin_cpu_supports("avx512f"), "AVX-512");
  add(__builtin_cpu_supports("avx512bf16"), "AVX-512 bfloat16");
#endif
  return features;
}

void examine_program(Examination& report) {
  fmt::print("Program\n");
  report.good("phalanx", PHALANX_VERSION);
  report.good("libtorch", fmt::format("{}, {} build", TORCH_VERSION, is_cuda_build() ? "CUDA" : "CPU"));
}

void examine_processor(Examination& report) {
  fmt::print("Processor\n");
  const train::DeviceInfo cpu = train::describe_device(at::kCPU);
  const CpuLimits limits = cpu_limits();
  report.good("model", cpu.name);
  const std::string cores = fmt::format("{} usable of {}{}", limits.usable, limits.online,
                                        limits.quota ? fmt::format(" (cgroup quota {:.2g})", *limits.quota) : "");
  report.good("cores", cores);
  const std::string features = cpu_features();
  if (features.find("AVX2") != std::string::npos) {
    report.good("instructions", features);
  } else {
    report.note("instructions", features.empty() ? "no AVX2" : features, "kernels use the baseline instruction set");
  }
  report.good("threads", fmt::format("{} for one rank (OMP_NUM_THREADS {})", at::get_num_threads(),
                                     std::getenv("OMP_NUM_THREADS") ? std::getenv("OMP_NUM_THREADS") : "not set"));
  if (const auto rate = train::device_peak_tflops(at::kCPU, cpu.name)) {
    report.good("matrix products", fmt::format("{:.3f} TFLOP/s in float32 with these threads", *rate));
  }
}

void examine_memory(Examination& report) {
  fmt::print("Memory\n");
  report.good("total", human_bytes(train::host_memory_bytes()));
  const std::string pages = first_line("/sys/kernel/mm/transparent_hugepage/enabled");
  if (pages.find("[madvise]") != std::string::npos || pages.find("[always]") != std::string::npos) {
    report.good("huge pages", pages);
  } else {
    report.note("huge pages", pages.empty() ? "not known" : pages,
                "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (some 10 % faster on the CPU)");
  }
  const char* tunables = std::getenv("GLIBC_TUNABLES");
  const std::string allocator =
      fmt::format("glibc {}, {}", gnu_get_libc_version(), tunables && *tunables ? tunables : "no tunables");
  if (tunables && std::strstr(tunables, "glibc.malloc.hugetlb")) {
    report.good("allocator", allocator);
  } else {
    report.note("allocator", allocator, "start through `phalanx`, which sets glibc.malloc.hugetlb=1");
  }
}

// Ranks of one node communicate through memory that several processes map.
void examine_shared_memory(Examination& report) {
  fmt::print("Communication\n");
  constexpr std::size_t kBytes = 1 << 20;
  const int file = ::memfd_create("phalanx-doctor", MFD_CLOEXEC);
  void* memory = MAP_FAILED;
  if (file >= 0 && ::ftruncate(file, kBytes) == 0) {
    memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  const int error = errno;
  if (memory != MAP_FAILED) {
    report.good("shared memory", "works");
    ::munmap(memory, kBytes);
  } else {
    report.lacks("shared memory", std::strerror(error),
                 "ranks of this node cannot use the shm backend: set comm.backend = \"gloo\"");
  }
  if (file >= 0) ::close(file);
  struct statvfs space {};
  if (::statvfs("/dev/shm", &space) == 0) {
    const std::uint64_t free_bytes = std::uint64_t{space.f_bavail} * space.f_frsize;
    if (free_bytes >= (64U << 20)) {
      report.good("/dev/shm", fmt::format("{} free", human_bytes(free_bytes)));
    } else {
      report.note("/dev/shm", fmt::format("{} free", human_bytes(free_bytes)),
                  "in a container, give it more: docker run --shm-size=1g");
    }
  }
}

void examine_mpi(Examination& report) {
  if (const auto library = mpi_library()) return report.good("mpi", *library + ", for ranks started by mpirun or srun");
  report.note(
      "mpi", "not in this build, or no Open MPI on this node",
      "only comm.backend = \"mpi\" needs it: install Open MPI (scripts/bootstrap.sh --mpi), configure and build again");
}

// NCCL is needed if there are GPUs, and may be present without GPUs.
void examine_nccl(Examination& report) {
  if (!is_cuda_build()) return report.good("nccl", "not used by a CPU build of libtorch");
  try {
    report.good("nccl", nccl_version_text(*load_nccl()));
  } catch (const Error& error) {
    report.note("nccl", error.what(),
                "several GPUs would exchange data through host memory: install the nvidia-nccl wheel beside torch, or "
                "name its folder in LD_LIBRARY_PATH");
  }
}

void examine_devices(Examination& report) {
  fmt::print("Devices\n");
  const bool has_card = std::ifstream("/proc/driver/nvidia/version").good();
  const int count = at::hasCUDA() ? static_cast<int>(at::accelerator::deviceCount()) : 0;
  for (int i = 0; i < count; ++i) {
    const at::Device device(at::kCUDA, static_cast<at::DeviceIndex>(i));
    const train::DeviceInfo info = train::describe_device(device);
    const auto peak = train::device_peak_tflops(device, info.name);
    report.good("GPU", fmt::format("{}: {}, {}{}", i, info.name, human_bytes(info.total_bytes),
                                   peak ? fmt::format(", {} TFLOP/s bfloat16", *peak) : ", peak not known: no MFU"));
  }
  if (count > 0) return;
  if (has_card && !is_cuda_build()) {
    report.note("GPU", "there is one, but this libtorch is a CPU build",
                "build against a CUDA build of libtorch: -DPHALANX_TORCH_DIR=<its folder>");
  } else if (has_card) {
    report.note("GPU", "the driver is there, but libtorch sees no device",
                "look at nvidia-smi and CUDA_VISIBLE_DEVICES");
  } else {
    report.good("GPU", "none; training runs on the CPU");
  }
}

}  // namespace

int doctor_command(const Arguments& arguments) {
  CLI::App app;
  parse_options(app, arguments);
  Examination report;
  examine_program(report);
  examine_processor(report);
  examine_memory(report);
  examine_shared_memory(report);
  examine_mpi(report);
  examine_nccl(report);
  examine_devices(report);
  if (report.missing == 0) {
    fmt::print("Nothing that training needs is missing.\n");
  } else {
    fmt::print("{} thing{} that training needs {} missing; see above.\n", report.missing,
               report.missing == 1 ? "" : "s", report.missing == 1 ? "is" : "are");
  }
  return report.missing == 0 ? 0 : 1;
}

}  // namespace phalanx::cli
