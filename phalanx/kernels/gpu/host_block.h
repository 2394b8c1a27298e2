// A thread block on the host, and what kernels may ask of a thread block.
//
// A kernel is a struct with its arguments and an operator()(Block&). Code outside of each_lane() computes the same on
// all lanes. each_lane(f) calls f(lane) for all of them: one after the other here, at the same time on a GPU.
// PerLane<T> is a register of each lane. Shared<T, N> is memory that all lanes see; barrier() separates writes to it
// from other lanes' reads. reduce() combines a register of all lanes and is a barrier, too.
#pragma once

#include <cstdint>
#include <vector>

namespace phalanx::kernels::gpu {

class HostBlock {
 public:
  HostBlock(std::int64_t index, int index_y, int lanes) : index_(index), index_y_(index_y), lanes_(lanes) {}

  template <class T>
  class PerLane {
   public:
    explicit PerLane(const HostBlock& block) : values_(static_cast<std::size_t>(block.lanes())) {}
    T& operator[](int lane) { return values_[static_cast<std::size_t>(lane)]; }

   private:
    std::vector<T> values_;
  };
  template <class T, int N>
  class Shared {
   public:
    explicit Shared(const HostBlock&) : values_(N) {}
    T& operator[](int i) { return values_[static_cast<std::size_t>(i)]; }

   private:
    std::vector<T> values_;
  };

  std::int64_t index() const { return index_; }
  int index_y() const { return index_y_; }
  int lanes() const { return lanes_; }

  template <class F>
  void each_lane(F f) const {
    for (int lane = 0; lane < lanes_; ++lane) f(lane);
  }
  void barrier() const {}

  /// In a GPU's order: within warps first, then over the warps' results, always between lanes whose numbers differ
  /// in one bit, the highest first.
  template <class T, class Combine>
  T reduce(PerLane<T>& values, T identity, Combine combine) const {
    T warps[kWarp];
    for (int warp = 0; warp < kWarp; ++warp) {
      T lanes[kWarp];
      for (int lane = 0; lane < kWarp; ++lane) {
        lanes[lane] = warp * kWarp + lane < lanes_ ? values[warp * kWarp + lane] : identity;
      }
      warps[warp] = warp * kWarp < lanes_ ? of_warp(lanes, combine) : identity;
    }
    return lanes_ <= kWarp ? warps[0] : of_warp(warps, combine);
  }

 private:
  static constexpr int kWarp = 32;

  template <class T, class Combine>
  static T of_warp(T* values, Combine combine) {
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      for (int lane = 0; lane < distance; ++lane) values[lane] = combine(values[lane], values[lane + distance]);
    }
    return values[0];
  }

  std::int64_t index_;
  int index_y_, lanes_;
};

}  // namespace phalanx::kernels::gpu
