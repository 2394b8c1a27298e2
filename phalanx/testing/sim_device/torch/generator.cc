// Random numbers of the simulated devices. A generator holds a seed and an offset, as CUDA's does. Each operator draws
// from a CPU generator of its own, made from both. So what an operator draws depends on the order of launches alone.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>

#include <array>
#include <cstring>

#include "phalanx/testing/sim_device/torch/registration.h"

namespace phalanx::sim_device {
namespace {

constexpr std::uint64_t kOffsetOfOperator = 4;  // CUDA's counter moves in steps of four

class SimGenerator final : public c10::GeneratorImpl {
 public:
  explicit SimGenerator(int device)
      : GeneratorImpl(SimBackend::device(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(std::uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  std::uint64_t current_seed() const override { return seed_; }
  std::uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(std::uint64_t offset) override { offset_ = offset; }
  std::uint64_t get_offset() const override { return offset_; }
  void set_state(const c10::TensorImpl& state) override {
    std::array<std::uint64_t, 2> words{};
    TORCH_CHECK(state.numel() == sizeof(words), "sim: a generator's state has ", sizeof(words), " bytes, found ",
                state.numel());
    std::memcpy(words.data(), state.data(), sizeof(words));
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const std::array<std::uint64_t, 2> words{seed_, offset_};
    at::Tensor state = at::empty({sizeof(words)}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), words.data(), sizeof(words));
    return state.getIntrusivePtr();
  }

  at::Generator next() {
    const std::lock_guard lock(mutex_);
    offset_ += kOffsetOfOperator;
    return at::detail::createCPUGenerator(seed_ * 0x9e3779b97f4a7c15ULL + offset_);
  }

 private:
  SimGenerator* clone_impl() const override {
    auto* copy = new SimGenerator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  std::uint64_t seed_ = c10::default_rng_seed_val;
  std::uint64_t offset_ = 0;
};

}  // namespace

at::Generator make_sim_generator(int device) { return at::make_generator<SimGenerator>(device); }

const at::Generator& default_generator(int device) {
  static const auto& generators = *new std::array<at::Generator, kDevices>([] {
    std::array<at::Generator, kDevices> made;
    for (int i = 0; i < kDevices; ++i) made[static_cast<std::size_t>(i)] = make_sim_generator(i);
    return made;
  }());
  return generators.at(static_cast<std::size_t>(device < 0 ? current_device() : device));
}

at::Generator next_generator(const at::Generator& device_generator) {
  return static_cast<SimGenerator*>(device_generator.unsafeGetGeneratorImpl())->next();
}

}  // namespace phalanx::sim_device
