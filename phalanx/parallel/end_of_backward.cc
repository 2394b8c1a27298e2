#include "phalanx/parallel/end_of_backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>
#include <utility>

namespace phalanx {
namespace {

// The engine drops the calls it was asked for, and with them this, when the pass ends with an exception.
struct EndOfBackward {
  std::function<void()> done, dropped;
  bool has_run = false;

  ~EndOfBackward() {
    if (!has_run) dropped();
  }
};

}  // namespace

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

void at_end_of_backward(std::function<void()> done, std::function<void()> dropped) {
  auto end = std::make_shared<EndOfBackward>();
  end->done = std::move(done);
  end->dropped = std::move(dropped);
  torch::autograd::Engine::get_default_engine().queue_callback([end] {
    end->has_run = true;
    end->done();
  });
}

// Inside a node's evaluation there is one: the pass that ends now was started by a node of an outer pass.
bool inside_an_outer_backward() { return static_cast<bool>(torch::autograd::get_current_node()); }

}  // namespace phalanx
