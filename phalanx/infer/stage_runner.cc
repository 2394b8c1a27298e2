#include "phalanx/infer/stage_runner.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <utility>

#include "phalanx/comm/backend.h"
#include "phalanx/models/llama.h"
#include "phalanx/tensor/device_readback.h"

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

at::Tensor StageRunner::input_of(const ForwardBatch& batch) const {
  const at::TensorOptions options = model_.activations();
  if (model_.part().embedding) return batch.tokens.to(options.device());
  at::Tensor hidden = at::empty({batch.tokens.size(0), batch.tokens.size(1), model_.config().dim}, options);
  stages_->recv(hidden, stages_->rank() - 1);
  return hidden;
}

void StageRunner::begin(const ForwardBatch& batch, nn::KvCache& cache, const Choose& choose) {
  InFlight& mine = in_flight_.emplace_back();
  mine.tokens = at::empty({std::ssize(batch.sample_rows)}, at::TensorOptions(at::kLong));
  const at::Tensor output = model_.forward(input_of(batch), cache, batch.counts, batch.first_row);
  if (!model_.part().head) {
    mine.sent.push_back(stages_->send(output.contiguous(), stages_->rank() + 1, {.async = true}));
    return;
  }
  choose_tokens(batch, output, choose, mine.tokens);
  if (!stages_ || batch.sample_rows.empty()) return;
  // Through host memory, wherever the model is: on a device the tokens would queue behind hidden states, which the
  // last stage receives in another order than the first stage sends them.
  for (int stage = 0; stage + 1 < stages_->size(); ++stage) {
    mine.sent.push_back(stages_->send(mine.tokens, stage, {.tag = kHostMemoryTag, .async = true}));
  }
}

/// `output`: logits [rows, vocab].
void StageRunner::choose_tokens(const ForwardBatch& batch, const at::Tensor& output, const Choose& choose,
                                const at::Tensor& tokens) {
  auto* const chosen = tokens.mutable_data_ptr<std::int64_t>();
  const std::vector<std::int64_t>& rows = batch.sample_rows;
  if (!output.device().is_cpu() && std::ranges::all_of(rows, choose.takes_likeliest)) {
    if (rows.empty()) return;
    const auto [logits, ids] = output.max(-1);
    const at::Tensor on_host = at::stack({logits.to(at::kDouble), ids.to(at::kDouble)}).to(at::kCPU);  // [2, rows]
    const auto* const logit = on_host.const_data_ptr<double>();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto token = static_cast<std::int64_t>(logit[output.size(0) + rows[i]]);
      chosen[i] = choose.likeliest(rows[i], token, logit[rows[i]]);
    }
    return;
  }
  const at::Tensor wide = output.to(at::kFloat).contiguous();
  // Through pinned memory, to which a device copies at the full speed of its bus.
  const at::Tensor logits = wide.device().is_cpu() ? wide : DeviceReadback(wide).wait();
  const std::int64_t vocab = logits.size(1);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const float* row = logits.const_data_ptr<float>() + rows[i] * vocab;
    chosen[i] = choose.from_logits(rows[i], {row, static_cast<std::size_t>(vocab)});
  }
}

std::vector<std::int64_t> StageRunner::finish() {
  InFlight batch = std::move(in_flight_.front());
  in_flight_.pop_front();
  if (!model_.part().head && batch.tokens.numel() > 0) {
    stages_->recv(batch.tokens, stages_->size() - 1, {.tag = kHostMemoryTag});
  }
  for (Work& work : batch.sent) work.wait();
  const auto* data = batch.tokens.const_data_ptr<std::int64_t>();
  return {data, data + batch.tokens.numel()};
}

}  // namespace phalanx::infer
