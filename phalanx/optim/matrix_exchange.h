// MatrixExchange: matrices of which ranks hold parts are each put together on one rank, their owner, replaced there by
// a function of the whole matrix, and given back in parts.
//
// - Each matrix is computed once. The result has the same bits in every layout, as the function sees the whole.
// - Every rank that holds a part may be an owner. Matrices are given to owners by the work they are, the most expensive
//   one first, each to the owner that has least to do so far.
// - Where several ranks hold the same part, the owner takes it from the copy of the model that it belongs to itself.
// - It goes in rounds, each of about so many elements for each owner: while a round is computed, the next one is on its
//   way to its owners, and the one before on its way back.
// - Messages are asynchronous. On a device the host waits for nothing.
//
//   const MatrixExchange exchange(matrices, newton_schulz_cost, world);
//   parts = exchange.apply({0, 1, 2}, parts, [](const at::Tensor& whole) { return newton_schulz(whole, {}); });
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/layout/box.h"
#include "phalanx/tensor/named.h"

namespace phalanx {

class MatrixExchange {
 public:
  using Cost = std::function<double(const std::vector<std::int64_t>& shape)>;
  using Function = std::function<at::Tensor(const at::Tensor& whole)>;

  /// `comm`: the ranks that hold parts, which are the ranks of the matrices' meshes; null: this rank has everything.
  /// A matrix without a shard is whole on each of them. `round_elements`: of a round, for each owner. Throws Error if a
  /// mesh is another.
  /// REQUIRES: `comm` outlives this object. All its ranks have the same matrices.
  MatrixExchange(const std::vector<NamedTensor>& matrices, const Cost& cost, Communicator* comm,
                 std::int64_t round_elements = std::int64_t{8} << 20);

  int owner_of(std::size_t matrix) const { return matrices_.at(matrix).owner; }

  /// Collective. For each of the chosen matrices, in ascending order, this rank's part of function(whole matrix).
  /// `parts`: what this rank holds of each of them; empty ones where it holds nothing. All have one dtype and device.
  /// REQUIRES: the same choice on all ranks. `function` keeps shape and dtype.
  std::vector<at::Tensor> apply(const std::vector<std::size_t>& chosen, const std::vector<at::Tensor>& parts,
                                const Function& function) const;

 private:
  struct Holder {
    int rank = 0;
    Box box;
  };
  struct Matrix {
    std::string name;
    std::vector<std::int64_t> shape;
    std::vector<Holder> holders;  // of parts that are not empty, in the order of ranks
    std::vector<Holder> sources;  // of each part one, from which the owner takes it
    int owner = 0;
  };
  using Round = std::vector<std::vector<std::size_t>>;  // by owner: positions in `chosen`
  class Pass;

  void hold(const NamedTensor& matrix, const Communicator* comm);
  static void choose_sources(Matrix& matrix);
  std::vector<Round> rounds_of(const std::vector<std::size_t>& chosen) const;

  std::vector<Matrix> matrices_;
  Communicator* comm_;
  std::int64_t round_elements_;
  int rank_ = 0, ranks_ = 1;
};

}  // namespace phalanx
