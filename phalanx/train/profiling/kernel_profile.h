// KernelProfile records what a device runs: each kernel and copy on a GPU, each operator of libtorch on a CPU. It uses
// libtorch's own profiler (kineto; CUPTI on a GPU).
//
// A process has one such profiler. Where ranks are threads of one process the first one records the CPU's operators of
// its own thread and of its autograd threads, and the others record nothing.
//
//   if (auto profile = KernelProfile::start(device)) {
//     step();
//     profile->write(folder / "rank0_kernels");  // rank0_kernels.json for ui.perfetto.dev, rank0_kernels.txt to read
//   }
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>

namespace phalanx::train {

class KernelProfile {
 public:
  /// Waits for the device, and begins to record. Null if this process already records.
  static std::unique_ptr<KernelProfile> start(at::Device device);
  /// Forgets what has been recorded, if it has not been written.
  ~KernelProfile();
  KernelProfile(const KernelProfile&) = delete;
  KernelProfile& operator=(const KernelProfile&) = delete;

  /// Waits for the device, ends the recording, and writes two files. Call it once, in the thread that called start().
  /// `PATH.json` is a trace. `PATH.txt` is a table, the longest first: name, calls, time without that of nested
  /// operators in ms, share of the time recorded. Its first line says how many there were and how long one of them at
  /// least was under way. Throws if a file cannot be written.
  void write(const std::string& path);

 private:
  explicit KernelProfile(at::Device device);

  const at::Device device_;
  bool records_ = false;
};

}  // namespace phalanx::train
