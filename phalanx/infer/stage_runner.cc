#include "phalanx/infer/stage_runner.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include <utility>

#include "phalanx/comm/backend.h"
#include "phalanx/models/llama.h"

namespace phalanx::infer {

StageRunner::StageRunner(models::Llama& model, std::shared_ptr<Communicator> stages)
    : model_(model), stages_(std::move(stages)) {}

std::int64_t StageRunner::agree_on_smallest(std::int64_t number) const {
  if (!stages_) return number;
  const at::Tensor smallest = at::scalar_tensor(number, at::TensorOptions(at::kLong));
  const at::Tensor on_device = smallest.to(model_.parameters().front().device());
  stages_->all_reduce(on_device, {.op = ReduceOp::min});
  return on_device.item<std::int64_t>();
}

at::Tensor StageRunner::input_of(const Pass& pass) const {
  const auto parameter = model_.parameters().front();
  if (model_.part().embedding) return pass.tokens.to(parameter.device());
  const at::Tensor hidden = at::empty({pass.tokens.size(0), pass.tokens.size(1), model_.config().dim},
                                      parameter.options().requires_grad(false));
  stages_->recv(hidden, stages_->rank() - 1);
  return hidden;
}

void StageRunner::begin(const Pass& pass, nn::KvCache& cache, const Choose& choose) {
  UnderWay& mine = under_way_.emplace_back();
  mine.tokens = at::empty({std::ssize(pass.wanted)}, at::TensorOptions(at::kLong));
  const at::Tensor output = model_.forward(input_of(pass), cache, pass.counts, pass.first_row);
  if (!model_.part().head) {
    mine.sent.push_back(stages_->send(output.contiguous(), stages_->rank() + 1, {.async = true}));
    return;
  }
  const at::Tensor logits = output.to(at::kCPU, at::kFloat).contiguous();  // [rows, vocab]
  const std::int64_t vocab = logits.size(1);
  for (std::size_t i = 0; i < pass.wanted.size(); ++i) {
    const float* row = logits.const_data_ptr<float>() + pass.wanted[i] * vocab;
    mine.tokens.mutable_data_ptr<std::int64_t>()[i] = choose(pass.wanted[i], {row, static_cast<std::size_t>(vocab)});
  }
  if (!stages_ || pass.wanted.empty()) return;
  // From host to host, wherever the model is: on a device the tokens would stand in line with hidden states, which the
  // last stage takes in another order than the first one sends them.
  for (int stage = 0; stage + 1 < stages_->size(); ++stage) {
    mine.sent.push_back(stages_->send(mine.tokens, stage, {.tag = kHostMemoryTag, .async = true}));
  }
}

std::vector<std::int64_t> StageRunner::finish() {
  UnderWay pass = std::move(under_way_.front());
  under_way_.pop_front();
  if (!model_.part().head && pass.tokens.numel() > 0) {
    stages_->recv(pass.tokens, stages_->size() - 1, {.tag = kHostMemoryTag});
  }
  for (Work& work : pass.sent) work.wait();
  const auto* data = pass.tokens.const_data_ptr<std::int64_t>();
  return {data, data + pass.tokens.numel()};
}

}  // namespace phalanx::infer
