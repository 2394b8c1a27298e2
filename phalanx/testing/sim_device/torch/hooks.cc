// What libtorch asks a device about other than by operators.
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "phalanx/testing/sim_device/torch/registration.h"

namespace phalanx::sim_device {
namespace {

class SimHooks final : public at::PrivateUse1HooksInterface {
 public:
  explicit SimHooks(SimBackend& backend) : backend_(backend) {}

  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  void init() const override {}

  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device() = device; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(current_device(), device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return make_sim_generator(device < 0 ? current_device() : device);
  }

  c10::Device getDeviceFromPtr(void* data) const override {
    return SimBackend::device(backend_.runtime.memory().device_of(data));
  }
  bool isPinnedPtr(const void* data) const override { return backend_.runtime.pinned().owns(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    c10::DataPtr grown = device_allocator().allocate(bytes);
    const std::size_t kept = std::min<std::size_t>(storage.nbytes(), bytes);
    if (kept > 0) device_allocator().copy_data(grown.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(bytes);
  }

 private:
  SimBackend& backend_;
};

}  // namespace

void register_hooks(SimBackend& backend) { at::RegisterPrivateUse1HooksInterface(new SimHooks(backend)); }

}  // namespace phalanx::sim_device
