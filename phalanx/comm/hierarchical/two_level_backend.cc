#include "phalanx/comm/hierarchical/two_level_backend.h"

#include <fmt/format.h>

#include <algorithm>

#include "phalanx/base/error.h"
#include "phalanx/comm/hierarchical/two_level_steps.h"

namespace phalanx {
namespace {

constexpr std::size_t kTwoLevelMemory = 64U << 20;

class TwoLevelCollective final : public Operation {
 public:
  TwoLevelCollective(TwoLevelBackend& backend, const OperationDescription& description)
      : backend_(backend), d_(description), steps_(backend), is_flat_(!wants_two_levels(backend, description)) {
    if (backend_.inner() != nullptr) steps_.inside({});
    OperationDescription compared = d_;
    compared.compare_only = !is_flat_;
    steps_.flat(compared);
  }

  Progress advance() override {
    const Progress progress = steps_.advance();
    if (progress != Progress::done || is_flat_ || has_data_) return progress;
    has_data_ = true;
    if (d_.verb == Verb::all_reduce || d_.verb == Verb::reduce || d_.verb == Verb::reduce_scatter)
      add_reduction_steps(backend_, d_, steps_);
    else
      add_data_steps(backend_, d_, steps_);
    return Progress::moved;
  }
  bool add_doorbells(std::vector<Doorbell>& bells) override { return steps_.add_doorbells(bells); }
  void check_peers() override { steps_.check_peers(); }
  bool retire() noexcept override { return steps_.retire(); }
  std::vector<int> missing_ranks() override { return steps_.missing_ranks(); }

 private:
  TwoLevelBackend& backend_;
  const OperationDescription& d_;
  Steps steps_;
  const bool is_flat_;
  bool has_data_ = false;
};

// send, recv and batch_p2p: what stays on the machine, and what leaves it, at once.
class TwoLevelMessages final : public Operation {
 public:
  TwoLevelMessages(TwoLevelBackend& backend, const OperationDescription& description) : backend_(backend) {
    for (const Transfer& transfer : description.transfers) {
      if (transfer.tag == kTwoLevelTag)
        throw CommError(fmt::format("tag {} is reserved for messages between machines: choose another", kTwoLevelTag));
      const bool inside = backend.inner() != nullptr && backend.is_here(transfer.peer);
      Part& part = inside ? inside_ : between_;
      part.description.transfers.push_back(transfer);
      if (inside) part.description.transfers.back().peer = backend.layout().place_of(transfer.peer);
      if (transfer.is_send)
        backend.count(inside, static_cast<std::size_t>(transfer.count) * element_size(transfer.dtype));
    }
    for (Part* part : {&inside_, &between_}) {
      if (part->description.transfers.empty()) continue;
      part->description.verb = description.verb;
      part->description.sequence = description.sequence;
      Backend& way = part == &inside_ ? *backend.inner() : backend.flat();
      part->operation = way.start(part->description);
    }
  }

  Progress advance() override {
    bool moved = false, all = true;
    for (Part* part : {&inside_, &between_}) {
      if (!part->operation) continue;
      const Progress progress = part->operation->advance();
      moved |= progress != Progress::blocked;
      if (progress == Progress::done)
        part->operation.reset();
      else
        all = false;
    }
    return all ? Progress::done : moved ? Progress::moved : Progress::blocked;
  }
  bool add_doorbells(std::vector<Doorbell>& bells) override {
    bool all = true;
    for (Part* part : {&inside_, &between_})
      if (part->operation) all = part->operation->add_doorbells(bells) && all;
    return all;
  }
  void check_peers() override {
    for (Part* part : {&inside_, &between_})
      if (part->operation) part->operation->check_peers();
    if (!between_.operation) backend_.flat().check_ranks();  // an abort from another machine
  }
  bool retire() noexcept override {
    bool all = true;
    for (Part* part : {&inside_, &between_})
      if (part->operation) all = part->operation->retire() && all;
    return all;
  }
  std::vector<int> missing_ranks() override {
    std::vector<int> missing;
    if (inside_.operation)
      for (const int place : inside_.operation->missing_ranks())
        missing.push_back(backend_.neighbours()[static_cast<std::size_t>(place)]);
    if (between_.operation)
      for (const int rank : between_.operation->missing_ranks()) missing.push_back(rank);
    std::ranges::sort(missing);
    return missing;
  }

 private:
  struct Part {
    OperationDescription description;
    std::unique_ptr<Operation> operation;
  };
  TwoLevelBackend& backend_;
  Part inside_, between_;
};

}  // namespace

TwoLevelBackend::TwoLevelBackend(std::shared_ptr<Backend> flat, std::shared_ptr<Backend> inner, MachineLayout layout,
                                 Tuning tuning)
    : flat_(std::move(flat)),
      inner_(std::move(inner)),
      layout_(std::move(layout)),
      tuning_(tuning),
      name_(fmt::format("shm+{}", flat_->traits().name)) {}

BackendTraits TwoLevelBackend::traits() const noexcept {
  BackendTraits traits = flat_->traits();
  traits.name = name_;
  traits.crowded = traits.crowded || (inner_ && inner_->traits().crowded);
  return traits;
}

std::unique_ptr<Operation> TwoLevelBackend::start(const OperationDescription& description) {
  if (description.transfers.empty()) return std::make_unique<TwoLevelCollective>(*this, description);
  return std::make_unique<TwoLevelMessages>(*this, description);
}

std::shared_ptr<Backend> TwoLevelBackend::split(const SplitRequest& request) {
  // The members that are on this machine, in the order of the new group.
  std::vector<int> machine_of, here, names;
  int place = -1;
  for (std::size_t i = 0; i < request.members.size(); ++i) {
    const int member = request.members[i];
    machine_of.push_back(layout_.machine_of(member));
    if (!is_here(member)) continue;
    if (static_cast<int>(i) == request.rank) place = static_cast<int>(here.size());
    here.push_back(layout_.place_of(member));
    names.push_back(static_cast<int>(i));
  }
  const MachineLayout layout(machine_of);
  const bool is_on_one = layout.machines() == 1;

  // Every rank of this group takes part in the same exchanges, whatever becomes of it: two of inner's, and one more, so
  // that all give up together if one cannot go on.
  SplitRequest within = request;
  within.members = here.size() > 1 ? here : std::vector<int>();
  within.rank = within.members.empty() ? -1 : place;
  within.names = names;
  within.exchange = [&](const std::string& value) {
    const std::vector<std::string> all = request.exchange(value);
    std::vector<std::string> of_machine;
    for (const int rank : neighbours()) of_machine.push_back(all[static_cast<std::size_t>(rank)]);
    return of_machine;
  };
  std::shared_ptr<Backend> inner;
  std::string trouble;
  if (inner_) {
    try {
      inner = inner_->split(within);
    } catch (const CommError& error) {
      trouble = error.what();
    }
  } else {
    request.exchange("");
    request.exchange("");
  }
  const std::vector<std::string> troubles = request.exchange(trouble);
  for (const int member : request.members)
    if (const std::string& text = troubles[static_cast<std::size_t>(member)]; !text.empty()) throw CommError(text);
  if (is_on_one && inner) {
    flat_->split({.members = {},
                  .rank = -1,
                  .name = request.name,
                  .serial = request.serial,
                  .names = {},
                  .exchange = request.exchange});
    return inner;
  }
  std::shared_ptr<Backend> flat = flat_->split(request);
  if (!flat || layout.machines() == layout.ranks() || is_on_one) return flat;
  return std::make_shared<TwoLevelBackend>(std::move(flat), std::move(inner), layout, tuning_);
}

void TwoLevelBackend::abort(const std::string& reason) noexcept {
  if (inner_) inner_->abort(reason);
  flat_->abort(reason);
}

void TwoLevelBackend::check_ranks() {
  if (inner_) inner_->check_ranks();
  flat_->check_ranks();
}

std::unique_ptr<std::byte[]> TwoLevelBackend::take_memory(std::size_t bytes) {
  const auto found = memory_.find(bytes);
  if (found == memory_.end()) return std::unique_ptr<std::byte[]>(new std::byte[bytes]);
  std::unique_ptr<std::byte[]> memory = std::move(found->second);
  memory_.erase(found);
  kept_ -= bytes;
  return memory;
}

void TwoLevelBackend::give_back(std::unique_ptr<std::byte[]> memory, std::size_t bytes) {
  if (kept_ + bytes > kTwoLevelMemory) return;
  kept_ += bytes;
  memory_.emplace(bytes, std::move(memory));
}

}  // namespace phalanx
