#include "phalanx/parallel/replicate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <unordered_set>

#include "phalanx/base/error.h"

namespace phalanx {
namespace {

constexpr std::int64_t kBroadcastAlignment = 64;

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

void broadcast_chunk(Communicator& comm, const std::vector<NamedTensor>& tensors, std::int64_t bytes, int root) {
  const at::Tensor flat = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(tensors[0].tensor.device()));
  const auto for_each_slot = [&](const auto& visit) {
    std::int64_t offset = 0;
    for (const auto& [name, tensor, shard] : tensors) {
      const auto size = static_cast<std::int64_t>(tensor.nbytes());
      if (size == 0) continue;
      visit(tensor, flat.narrow(0, offset, size).view(tensor.scalar_type()).view(tensor.sizes()));
      offset += (size + kBroadcastAlignment - 1) / kBroadcastAlignment * kBroadcastAlignment;
    }
  };
  if (comm.rank() == root) {
    for_each_slot([](const at::Tensor& tensor, const at::Tensor& slot) { slot.copy_(tensor); });
  }
  comm.broadcast(flat, {.root = root});
  if (comm.rank() != root) {
    for_each_slot([](const at::Tensor& tensor, const at::Tensor& slot) { tensor.copy_(slot); });
  }
}

}  // namespace

std::vector<NamedTensor> named_buffers(const torch::nn::Module& module) {
  std::vector<NamedTensor> result;
  std::unordered_set<const void*> seen;
  for (const auto& item : module.named_buffers()) {
    const at::Tensor& tensor = item.value();
    if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second) result.push_back({item.key(), tensor});
  }
  return result;
}

std::string describe(const at::Tensor& tensor) { return describe_global({"", tensor}); }

std::string describe_global(const NamedTensor& parameter) {
  const at::Tensor& tensor = parameter.tensor;
  return fmt::format("{} [{}]{}", c10::toString(tensor.scalar_type()), fmt::join(parameter.global_shape(), ", "),
                     tensor.requires_grad() ? " requires_grad" : "");
}

void require_same_on_all_ranks(Communicator& comm, const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += line + '\n';
  const std::string expected_text = comm.broadcast_bytes(text);
  std::string difference;
  if (text != expected_text) {
    const auto expected = lines_of(expected_text);
    std::size_t i = 0;
    while (i < lines.size() && i < expected.size() && lines[i] == expected[i]) ++i;
    difference = fmt::format("rank {} has {}, rank 0 has {}", comm.rank(), i < lines.size() ? lines[i] : "nothing more",
                             i < expected.size() ? expected[i] : "nothing more");
  }
  for (const auto& found : comm.all_gather_bytes(difference)) {
    if (!found.empty()) {
      throw Error(fmt::format(
          "the ranks hold different models: {}. Build the same model, with the same options, on every rank", found));
    }
  }
}

void broadcast_coalesced(Communicator& comm, const std::vector<NamedTensor>& tensors, std::size_t chunk_bytes,
                         int root) {
  if (comm.size() == 1) return;
  const at::NoGradGuard no_grad;
  std::vector<NamedTensor> chunk;
  std::int64_t bytes = 0;
  const auto flush = [&] {
    if (bytes > 0) broadcast_chunk(comm, chunk, bytes, root);
    chunk.clear();
    bytes = 0;
  };
  for (const auto& named : tensors) {
    const auto size = (static_cast<std::int64_t>(named.tensor.nbytes()) + kBroadcastAlignment - 1) /
                      kBroadcastAlignment * kBroadcastAlignment;
    if (!chunk.empty() && bytes + size > static_cast<std::int64_t>(chunk_bytes)) flush();
    chunk.push_back(named);
    bytes += size;
  }
  flush();
}

}  // namespace phalanx
