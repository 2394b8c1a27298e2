#include "phalanx/parallel/pipeline/stage_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include "phalanx/base/assert.h"
#include "phalanx/base/error.h"
#include "phalanx/nn/init.h"
#include "phalanx/parallel/pipeline/stage_p2p.h"

namespace phalanx {

StageGradients::StageGradients(const std::vector<PipelineStage>& stages, std::shared_ptr<Communicator> comm)
    : comm_(std::move(comm)) {
  for (const auto& stage : stages) {
    for (const NamedTensor& found : nn::named_parameters(*stage.module)) {
      const at::Tensor& tensor = found.tensor;
      if (!tensor.requires_grad()) continue;
      const auto same = std::ranges::find_if(parameters_, [&](const auto& p) { return p->tensor.is_same(tensor); });
      if (same != parameters_.end()) {
        (*same)->stages.push_back(stage.index);
        continue;
      }
      auto& made = *parameters_.emplace_back(std::make_unique<Parameter>());
      made.name = found.name;
      made.tensor = tensor;
      made.stages = {stage.index};
      made.subscription = on_grad_ready(tensor, [&made](const at::Tensor&) { made.is_fired = true; });
    }
  }
  find_tied_parameters();
}

void StageGradients::find_tied_parameters() {
  std::string mine;
  for (const auto& p : parameters_) {
    mine += fmt::format("{}\t{}\t{}\n", p->stages.front(), p->name, TensorShape::of(p->tensor).text());
  }
  struct Found {
    TiedParameter copies;
    std::string shape;
  };
  std::map<std::string, Found> by_name;
  const auto all = comm_->all_gather_bytes(mine);
  for (int rank = 0; rank < comm_->size(); ++rank) {
    std::istringstream lines(all[static_cast<std::size_t>(rank)]);
    std::string stage, name, shape;
    for (int number = 0; std::getline(lines, stage, '\t'); ++number) {
      std::getline(lines, name, '\t');
      std::getline(lines, shape);
      Found& found = by_name[name];
      const Copy copy{.stage = std::stoi(stage), .rank = rank, .parameter = number};
      if (!found.copies.all.empty() && found.shape != shape) {
        throw Error(fmt::format(
            "pipeline: parameter '{}' is {} on stage {} and {} on stage {}; a name on two stages is one parameter, "
            "with one shape (stages keep the names of the whole model)",
            name, found.shape, found.copies.all.front().stage, shape, copy.stage));
      }
      found.copies.name = name;
      found.copies.all.push_back(copy);
      found.shape = shape;
    }
  }
  for (auto& [name, found] : by_name) {
    auto& copies = found.copies.all;
    if (copies.size() < 2) continue;
    std::ranges::sort(copies, {}, &Copy::stage);
    bool is_here = false;
    for (const auto& copy : copies) {
      if (copy.rank != comm_->rank()) continue;
      parameters_[static_cast<std::size_t>(copy.parameter)]->is_tied = true;
      is_here = true;
    }
    if (is_here) tied_.push_back(std::move(found.copies));
  }
}

void StageGradients::begin_step() {
  for (const auto& p : parameters_) {
    PHALANX_ASSERT(!p->hold, "a step ends before the next one begins");
    p->stages_left = p->stages.size();
    p->is_fired = false;
    p->hold = std::make_unique<GradReadyHold>(std::vector{p->tensor});
  }
}

void StageGradients::before_last(int stage) {
  for (const auto& p : parameters_) {
    if (std::ranges::find(p->stages, stage) == p->stages.end()) continue;
    PHALANX_ASSERT(p->stages_left > 0, "a stage has one last backward pass in a step");
    if (--p->stages_left == 0 && !p->is_tied) p->hold.reset();
  }
}

void StageGradients::fire(Parameter& parameter) {
  if (parameter.is_fired) return;
  if (parameter.tensor.grad().defined()) {
    fire_grad_ready(parameter.tensor);
  } else if (grad_ready_listeners(parameter.tensor) > 1) {  // more than our own listener
    throw Error(fmt::format(
        "no micro-batch gave a gradient to '{}', which data parallelism waits for: use it in the loss, or freeze it "
        "(requires_grad = false) before attaching",
        parameter.name));
  }
}

void StageGradients::after_last(int stage) {
  // In the order of backward passes: the last layers first.
  for (auto it = parameters_.rbegin(); it != parameters_.rend(); ++it) {
    Parameter& p = **it;
    if (std::ranges::find(p.stages, stage) != p.stages.end() && p.stages_left == 0 && !p.is_tied) fire(p);
  }
}

void StageGradients::reduce_tied_gradients() {
  const at::NoGradGuard no_grad;
  for (const auto& [name, all] : tied_) {
    // Every copy's gradient, by stage: this rank's and those received.
    std::vector<at::Tensor> gradients;
    std::vector<Parameter*> mine;
    std::vector<Communicator::P2POp> operations;
    for (const auto& copy : all) {
      if (copy.rank == comm_->rank()) mine.push_back(parameters_[static_cast<std::size_t>(copy.parameter)].get());
    }
    // In the gradients' dtype, if it differs from the parameters'.
    const at::Tensor& own = mine.front()->tensor.grad();
    const at::Tensor& like = own.defined() ? own : mine.front()->tensor;
    std::size_t next = 0;
    for (const auto& copy : all) {
      if (copy.rank != comm_->rank()) {
        gradients.push_back(at::empty_like(like).set_requires_grad(false));
        operations.push_back({.is_send = false, .tensor = gradients.back(), .peer = copy.rank});
        continue;
      }
      const at::Tensor& grad = mine[next++]->tensor.grad();
      // In separate memory: the sum is written over the gradient while other ranks may still be reading it.
      gradients.push_back(grad.defined() ? grad.clone() : at::zeros_like(like).set_requires_grad(false));
      for (const auto& other : all) {
        const bool is_first_there = &other == &*std::ranges::find(all, other.rank, &Copy::rank);
        if (other.rank == comm_->rank() || !is_first_there) continue;
        operations.push_back({.is_send = true, .tensor = gradients.back(), .peer = other.rank});
      }
    }
    comm_->batch_isend_irecv(std::move(operations));
    at::Tensor sum = gradients.front().clone();
    for (std::size_t i = 1; i < gradients.size(); ++i) sum.add_(gradients[i]);
    for (Parameter* p : mine) {
      at::Tensor& grad = p->tensor.mutable_grad();
      grad.defined() ? void(grad.copy_(sum)) : void(grad = sum.clone());
      p->hold.reset();
      fire(*p);
    }
  }
}

void StageGradients::end_step() {
  for (const auto& p : parameters_) p->hold.reset();
}

std::vector<std::string> StageGradients::tied_names() const {
  std::vector<std::string> names;
  for (const auto& copies : tied_) names.push_back(copies.name);
  return names;
}

}  // namespace phalanx
