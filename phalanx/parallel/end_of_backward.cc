#include "phalanx/parallel/end_of_backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>
#include <utility>

namespace phalanx {
namespace {

// If the pass ends with an exception, the engine drops its queued callbacks and, with them, this object.
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

// While a node is evaluated there is one: then a node of an outer pass started the pass that ends now.
bool inside_an_outer_backward() { return static_cast<bool>(torch::autograd::get_current_node()); }

}  // namespace phalanx
