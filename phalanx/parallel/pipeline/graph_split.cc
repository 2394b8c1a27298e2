#include "phalanx/parallel/pipeline/graph_split.h"

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "phalanx/base/error.h"
#include "phalanx/tensor/weight_gradient.h"

namespace phalanx {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;
using NodePointer = decltype(Edge::function);  // its type differs between versions of libtorch

struct Arrived : torch::autograd::FunctionPreHook {
  explicit Arrived(std::shared_ptr<variable_list> grads) : grads(std::move(grads)) {}
  variable_list operator()(const variable_list& arriving) override {
    *grads = arriving;
    return arriving;
  }
  std::shared_ptr<variable_list> grads;
};

// A node that leads to the input and, on another path, to parameters.
struct Junction {
  NodePointer node;
  std::shared_ptr<variable_list> grads = std::make_shared<variable_list>();
  std::vector<std::size_t> parameters;
};

void add_to_gradient(const at::Tensor& parameter, const at::Tensor& gradient) {
  add_weight_gradient(parameter, [&](const WeightGradient& out) {
    out.beta == 0.0 ? out.out.copy_(gradient) : out.out.add_(gradient);
  });
}

}  // namespace

struct GraphSplit::Impl {
  at::Tensor x;
  Edge root, input;
  bool input_is_wanted = false, is_split = false;
  std::vector<at::Tensor> parameters;
  std::vector<NodePointer> accumulators;  // owned here: tensors refer to them weakly
  std::unordered_map<const Node*, std::size_t> parameter_at;
  std::unordered_map<Node*, bool> leads_to_input;
  std::unordered_map<Node*, NodePointer> pointers;
  std::vector<Junction> junctions;
  at::Tensor whole_gradient;  // of y, if backward_weight() does all the work

  // Every node below the root, children before parents.
  std::vector<Node*> children_first() {
    std::vector<Node*> order;
    std::unordered_set<Node*> seen;
    std::vector<std::pair<Node*, std::size_t>> path = {{root.function.get(), 0}};
    seen.insert(root.function.get());
    pointers[root.function.get()] = root.function;
    while (!path.empty()) {
      auto& [node, next] = path.back();
      if (next == node->num_outputs()) {
        order.push_back(node);
        path.pop_back();
        continue;
      }
      Node* child = node->next_edge(next++).function.get();
      if (child == nullptr || !seen.insert(child).second) continue;
      pointers[child] = node->next_edge(next - 1).function;
      path.emplace_back(child, 0);
    }
    return order;
  }

  // The parameters below a node on paths that do not lead to the input.
  std::vector<std::size_t> parameters_beside(Node* from) const {
    std::vector<std::size_t> found;
    std::unordered_set<Node*> seen;
    std::vector<Node*> open = {from};
    while (!open.empty()) {
      Node* node = open.back();
      open.pop_back();
      if (const auto p = parameter_at.find(node); p != parameter_at.end()) found.push_back(p->second);
      for (const auto& edge : node->next_edges()) {
        Node* child = edge.function.get();
        if (child != nullptr && !leads_to_input.at(child) && seen.insert(child).second) open.push_back(child);
      }
    }
    std::ranges::sort(found);
    return found;
  }

  void find_junctions() {
    const auto order = children_first();
    for (Node* node : order) {
      bool leads = node == input.function.get();
      for (const auto& edge : node->next_edges())
        leads = leads || (edge.function && leads_to_input.at(edge.function.get()));
      leads_to_input[node] = leads;
    }
    is_split = leads_to_input.at(root.function.get());
    std::unordered_set<std::size_t> met;
    for (auto it = order.rbegin(); is_split && it != order.rend(); ++it) {
      if (!leads_to_input.at(*it) || *it == input.function.get()) continue;
      Junction junction;
      junction.parameters = parameters_beside(*it);
      if (junction.parameters.empty()) continue;
      for (const std::size_t p : junction.parameters) is_split = met.insert(p).second && is_split;
      junction.node = pointers.at(*it);
      junctions.push_back(std::move(junction));
    }
    if (!is_split) junctions.clear();
  }

  void whole_backward(const at::Tensor& dy) {
    Engine::get_default_engine().execute({root}, {dy}, false, false, /*accumulate_grad=*/true);
  }
};

GraphSplit::GraphSplit(const at::Tensor& y, const at::Tensor& x, std::vector<at::Tensor> parameters)
    : impl_(std::make_unique<Impl>()) {
  impl_->root = torch::autograd::impl::gradient_edge(y);
  impl_->input_is_wanted = x.requires_grad();
  impl_->parameters = std::move(parameters);
  for (std::size_t i = 0; i < impl_->parameters.size(); ++i) {
    impl_->accumulators.push_back(torch::autograd::impl::grad_accumulator(impl_->parameters[i]));
    impl_->parameter_at[impl_->accumulators.back().get()] = i;
  }
  if (!impl_->input_is_wanted) return;
  impl_->x = x;
  impl_->input = torch::autograd::impl::gradient_edge(x);
  impl_->find_junctions();
  impl_->pointers.clear();
  impl_->leads_to_input.clear();
}

GraphSplit::~GraphSplit() = default;
GraphSplit::GraphSplit(GraphSplit&&) noexcept = default;
GraphSplit& GraphSplit::operator=(GraphSplit&&) noexcept = default;

at::Tensor GraphSplit::backward_input(const at::Tensor& dy) {
  if (!impl_->input_is_wanted) {
    impl_->whole_gradient = dy;
    return {};
  }
  if (!impl_->is_split) {
    impl_->whole_backward(dy);
    impl_->root = {};
    return std::exchange(impl_->x.mutable_grad(), at::Tensor());
  }
  for (const auto& junction : impl_->junctions) junction.node->add_pre_hook(std::make_unique<Arrived>(junction.grads));
  variable_list grads;
  try {
    grads = Engine::get_default_engine().execute({impl_->root}, {dy}, /*keep_graph=*/true, false,
                                                 /*accumulate_grad=*/false, {impl_->input});
  } catch (...) {
    impl_.reset();
    throw;
  }
  return grads.at(0);
}

void GraphSplit::backward_weight() {
  const auto impl = std::exchange(impl_, nullptr);
  if (!impl) throw Error("GraphSplit: the second half comes once, after the first");
  if (impl->whole_gradient.defined()) return impl->whole_backward(impl->whole_gradient);
  for (auto& junction : impl->junctions) {
    // Otherwise its hook would capture what arrives now, as in backward_input().
    std::erase_if(junction.node->pre_hooks(), [&](const auto& hook) {
      const auto* ours = dynamic_cast<const Arrived*>(hook.get());
      return ours != nullptr && ours->grads == junction.grads;
    });
    edge_list from, to;
    variable_list grads;
    for (std::uint32_t i = 0; i < junction.grads->size(); ++i) {
      if (!(*junction.grads)[i].defined()) continue;
      from.emplace_back(junction.node, i);
      grads.push_back((*junction.grads)[i]);
    }
    if (from.empty()) continue;
    for (const std::size_t p : junction.parameters) to.emplace_back(impl->accumulators[p], 0);
    const auto made = Engine::get_default_engine().execute(from, grads, false, false, false, to);
    for (std::size_t k = 0; k < made.size(); ++k) {
      if (made[k].defined()) add_to_gradient(impl->parameters[junction.parameters[k]], made[k]);
    }
    junction = Junction();
  }
}

}  // namespace phalanx
