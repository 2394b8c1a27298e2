#include "phalanx/optim/matrix_exchange.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/tensor/narrow_to_box.h"

namespace phalanx {
namespace {

/// One message: these values, one after the other.
at::Tensor packed(const std::vector<at::Tensor>& parts) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& part : parts) flat.push_back(part.reshape({-1}));  // no copy if it is contiguous
  return flat.size() == 1 ? flat.front() : at::cat(flat);
}

}  // namespace

MatrixExchange::MatrixExchange(const std::vector<NamedTensor>& matrices, const Cost& cost, Communicator* comm,
                               std::int64_t round_elements)
    : comm_(comm != nullptr && comm->size() > 1 ? comm : nullptr), round_elements_(round_elements) {
  if (comm_ != nullptr) {
    rank_ = comm_->rank();
    ranks_ = comm_->size();
  }
  for (const NamedTensor& matrix : matrices) hold(matrix, comm);
  std::vector<double> costs;
  for (const Matrix& matrix : matrices_) costs.push_back(cost(matrix.shape));
  std::vector<std::size_t> order(matrices_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::ranges::greater(), [&](std::size_t i) { return costs[i]; });
  std::vector<double> load(static_cast<std::size_t>(ranks_));
  for (const std::size_t i : order) {
    Matrix& matrix = matrices_[i];
    const auto least = std::ranges::min_element(
        matrix.holders, {}, [&](const Holder& holder) { return load[static_cast<std::size_t>(holder.rank)]; });
    matrix.owner = least->rank;
    load[static_cast<std::size_t>(matrix.owner)] += costs[i];
    choose_sources(matrix);
  }
}

void MatrixExchange::hold(const NamedTensor& matrix, const Communicator* comm) {
  Matrix held{.name = matrix.name, .shape = matrix.global_shape()};
  const Shard* const shard = matrix.shard.get();
  const Box whole{std::vector<std::int64_t>(held.shape.size()), held.shape};
  if (shard != nullptr && !(comm_ == nullptr && shard->box() == whole)) {
    const int ranks = comm_ == nullptr ? 1 : ranks_;
    if (shard->spec.mesh().size() != ranks || shard->rank != rank_) {
      throw Error(fmt::format(
          "matrix exchange: '{}' is held by {} ranks ({}), of which this one is rank {}; {}: pass the communicator of "
          "these ranks",
          matrix.name, shard->spec.mesh().size(), shard->spec.text(), shard->rank,
          comm == nullptr ? std::string("there is no communicator")
                          : fmt::format("communicator '{}' has {}, and this one is rank {}", comm->name(), comm->size(),
                                        comm->rank())));
    }
  }
  for (int rank = 0; rank < ranks_; ++rank) {
    const Box box = shard == nullptr || comm_ == nullptr ? whole : shard->spec.local_box(rank);
    if (!box.empty()) held.holders.push_back({rank, box});
  }
  if (held.holders.empty()) throw Error(fmt::format("matrix exchange: '{}' has no elements", matrix.name));
  matrices_.push_back(std::move(held));
}

/// The k-th holders of all parts belong to one copy of the model.
void MatrixExchange::choose_sources(Matrix& matrix) {
  std::map<std::vector<std::int64_t>, std::vector<Holder>> copies;  // by the part's offsets
  for (const Holder& holder : matrix.holders) copies[holder.box.offsets].push_back(holder);
  std::size_t copy = 0;
  for (const auto& [offsets, holders] : copies) {
    const auto own = std::ranges::find(holders, matrix.owner, &Holder::rank);
    if (own != holders.end()) copy = static_cast<std::size_t>(own - holders.begin());
  }
  for (const auto& [offsets, holders] : copies) matrix.sources.push_back(holders[std::min(copy, holders.size() - 1)]);
}

std::vector<MatrixExchange::Round> MatrixExchange::rounds_of(const std::vector<std::size_t>& chosen) const {
  std::vector<Round> rounds;
  std::vector<std::size_t> round_of(static_cast<std::size_t>(ranks_));  // by owner: the one that is being filled
  std::vector<std::int64_t> elements(static_cast<std::size_t>(ranks_));
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    const Matrix& matrix = matrices_.at(chosen[i]);
    const auto owner = static_cast<std::size_t>(matrix.owner);
    const std::int64_t count = matrix.shape[0] * matrix.shape[1];
    if (elements[owner] > 0 && elements[owner] + count > round_elements_) {
      ++round_of[owner];
      elements[owner] = 0;
    }
    elements[owner] += count;
    if (rounds.size() <= round_of[owner]) rounds.resize(round_of[owner] + 1, Round(static_cast<std::size_t>(ranks_)));
    rounds[round_of[owner]][owner].push_back(i);
  }
  return rounds;
}

/// The messages of one call of apply().
class MatrixExchange::Pass {
 public:
  Pass(const MatrixExchange& exchange, const std::vector<std::size_t>& chosen, const std::vector<at::Tensor>& parts)
      : exchange_(exchange), chosen_(chosen), parts_(parts), results_(parts), rounds_(exchange.rounds_of(chosen)) {}

  std::vector<at::Tensor> run(const Function& function) {
    std::vector<Flight> gathers, returns;
    for (std::size_t r = 0; r < rounds_.size(); ++r) {
      if (r == 0) gathers.push_back(gather(rounds_[0]));
      if (r + 1 < rounds_.size()) gathers.push_back(gather(rounds_[r + 1]));
      const std::vector<at::Tensor> whole = take_gathered(rounds_[r], gathers[r]);
      std::vector<at::Tensor> computed;
      for (const at::Tensor& matrix : whole) computed.push_back(function(matrix));
      returns.push_back(give_back(rounds_[r], computed));
      gathers[r] = {};
      if (r > 0) take_returned(rounds_[r - 1], returns[r - 1]);
    }
    if (!returns.empty()) take_returned(rounds_.back(), returns.back());
    return std::move(results_);
  }

 private:
  struct Flight {
    Work work;
    std::map<int, at::Tensor> received;  // by rank
  };

  const Matrix& matrix(std::size_t position) const { return exchange_.matrices_[chosen_[position]]; }
  const std::vector<std::size_t>& owned_by(const Round& round, int rank) const {
    return round[static_cast<std::size_t>(rank)];
  }

  /// The boxes of an owner's matrices that pass between it and `rank`, one after the other in one message.
  std::vector<std::pair<std::size_t, Box>> boxes(const Round& round, int owner, int rank, bool of_sources) const {
    std::vector<std::pair<std::size_t, Box>> result;
    for (const std::size_t i : owned_by(round, owner)) {
      for (const Holder& holder : of_sources ? matrix(i).sources : matrix(i).holders) {
        if (holder.rank == rank) result.emplace_back(i, holder.box);
      }
    }
    return result;
  }

  at::Tensor buffer_for(const std::vector<std::pair<std::size_t, Box>>& boxes) const {
    std::int64_t elements = 0;
    for (const auto& [i, box] : boxes) elements += box.numel();
    return at::empty({elements}, parts_.front().options());
  }

  Flight post(std::vector<Communicator::P2POp> operations, std::map<int, at::Tensor> received) const {
    Flight flight{.received = std::move(received)};
    if (operations.empty()) return flight;
    flight.work = exchange_.comm_->batch_isend_irecv(std::move(operations), {.async = true});
    return flight;
  }

  /// Calls body(box, its values) for each box of a message.
  template <class Body>
  static void unpack(const std::vector<std::pair<std::size_t, Box>>& boxes, const at::Tensor& message, Body&& body) {
    std::int64_t at = 0;
    for (const auto& [i, box] : boxes) {
      body(i, box, message.narrow(0, at, box.numel()).view(box.shape));
      at += box.numel();
    }
  }

  Flight gather(const Round& round) const {
    const int me = exchange_.rank_;
    std::vector<Communicator::P2POp> operations;
    std::map<int, at::Tensor> received;
    for (int other = 0; other < exchange_.ranks_; ++other) {
      if (other == me) continue;
      std::vector<at::Tensor> mine;
      for (const auto& [i, box] : boxes(round, other, me, /*of_sources=*/true)) mine.push_back(parts_[i]);
      if (!mine.empty()) operations.push_back({.is_send = true, .tensor = packed(mine), .peer = other});
      if (const auto theirs = boxes(round, me, other, /*of_sources=*/true); !theirs.empty()) {
        received[other] = buffer_for(theirs);
        operations.push_back({.is_send = false, .tensor = received[other], .peer = other});
      }
    }
    return post(std::move(operations), std::move(received));
  }

  /// This rank's own matrices, whole.
  std::vector<at::Tensor> take_gathered(const Round& round, Flight& flight) {
    flight.work.wait();
    const int me = exchange_.rank_;
    std::map<std::size_t, at::Tensor> whole;
    for (const std::size_t i : owned_by(round, me)) {
      const bool is_here = matrix(i).sources.size() == 1 && matrix(i).sources.front().rank == me;
      whole[i] = is_here ? parts_[i].contiguous() : at::empty(matrix(i).shape, parts_[i].options());
      if (is_here) continue;
      for (const Holder& source : matrix(i).sources) {
        if (source.rank == me) narrow_to_box(whole[i], source.box).copy_(parts_[i]);
      }
    }
    for (const auto& [rank, message] : flight.received) {
      unpack(
          boxes(round, me, rank, /*of_sources=*/true), message,
          [&](std::size_t i, const Box& box, const at::Tensor& values) { narrow_to_box(whole[i], box).copy_(values); });
    }
    std::vector<at::Tensor> result;
    for (const std::size_t i : owned_by(round, me)) result.push_back(whole[i]);
    return result;
  }

  Flight give_back(const Round& round, const std::vector<at::Tensor>& computed) {
    const int me = exchange_.rank_;
    std::map<std::size_t, at::Tensor> result;
    for (const std::size_t i : owned_by(round, me)) result[i] = computed[result.size()].contiguous();
    at::Tensor all;  // of ranks that hold all of these matrices
    std::vector<Communicator::P2POp> operations;
    std::map<int, at::Tensor> received;
    for (int other = 0; other < exchange_.ranks_; ++other) {
      const auto theirs = boxes(round, me, other, /*of_sources=*/false);
      if (other == me) {
        for (const auto& [i, box] : theirs) results_[i] = narrow_to_box(result[i], box);
        continue;
      }
      if (!theirs.empty()) {
        std::vector<at::Tensor> values;
        bool is_all = theirs.size() == result.size();
        for (const auto& [i, box] : theirs) {
          values.push_back(narrow_to_box(result[i], box));
          is_all = is_all && box.shape == matrix(i).shape;
        }
        if (is_all && !all.defined()) all = packed(values);
        operations.push_back({.is_send = true, .tensor = is_all ? all : packed(values), .peer = other});
      }
      if (const auto mine = boxes(round, other, me, /*of_sources=*/false); !mine.empty()) {
        received[other] = buffer_for(mine);
        operations.push_back({.is_send = false, .tensor = received[other], .peer = other});
      }
    }
    return post(std::move(operations), std::move(received));
  }

  void take_returned(const Round& round, Flight& flight) {
    flight.work.wait();
    for (const auto& [rank, message] : flight.received) {
      unpack(boxes(round, rank, exchange_.rank_, /*of_sources=*/false), message,
             [&](std::size_t i, const Box&, const at::Tensor& values) { results_[i] = values; });
    }
    flight = {};
  }

  const MatrixExchange& exchange_;
  const std::vector<std::size_t>& chosen_;
  const std::vector<at::Tensor>& parts_;
  std::vector<at::Tensor> results_;
  std::vector<Round> rounds_;
};

std::vector<at::Tensor> MatrixExchange::apply(const std::vector<std::size_t>& chosen,
                                              const std::vector<at::Tensor>& parts, const Function& function) const {
  if (chosen.empty()) return {};
  const at::NoGradGuard no_grad;
  return Pass(*this, chosen, parts).run(function);
}

}  // namespace phalanx
