// Trains a Llama on one rank from given weights and tokens, to compare it with other programs. The step is the same:
// mean next-token cross entropy, clip to norm 1, AdamW 0.9 0.95 1e-8 decay 0.1 on every parameter, lr 1e-3.
//
//   single_rank init.safetensors data.tokens [steps=20] [batch=8] [skip=3]
//
// Weights: safetensors with Hugging Face's names, fp32. Tokens: raw little-endian uint16; sample k is tokens
// [k seq, k seq + seq], step s uses samples s batch onwards. Prints one JSON line. Threads: OMP_NUM_THREADS.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "phalanx/base/process_stats.h"
#include "phalanx/models/config/hf_names.h"
#include "phalanx/models/llama.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/grad_norm.h"

namespace {

std::string read_all(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "single_rank: cannot read %s\n", path);
    std::exit(1);
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Reads a file that this benchmark's other program has just written: a length, a JSON header, then the bytes.
void load_weights(const char* path, const std::vector<phalanx::NamedTensor>& parameters) {
  const at::NoGradGuard no_grad;
  std::string bytes = read_all(path);
  const auto header_bytes = *reinterpret_cast<const std::uint64_t*>(bytes.data());
  const auto header = nlohmann::json::parse(bytes.substr(8, header_bytes));
  for (const auto& [name, tensor, shard] : parameters) {
    const auto& entry = header.at(phalanx::models::llama_hf_name(name));
    char* data = bytes.data() + 8 + header_bytes + entry["data_offsets"][0].get<std::size_t>();
    tensor.copy_(at::from_blob(data, tensor.sizes(), at::TensorOptions(at::kFloat)));
  }
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0.0 : v[v.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: single_rank weights.safetensors tokens [steps] [batch] [skip]\n");
    return 2;
  }
  const auto argument = [&](int i, std::int64_t otherwise) { return argc > i ? std::atoll(argv[i]) : otherwise; };
  const std::int64_t steps = argument(3, 20), batch = argument(4, 8), skip = argument(5, 3);
  const auto config = phalanx::models::llama_flavor("5M");
  const std::int64_t seq = config.max_seq_len;

  const auto model = std::make_shared<phalanx::models::Llama>(config);
  const auto parameters = phalanx::nn::named_parameters(*model);
  load_weights(argv[1], parameters);
  const std::string file = read_all(argv[2]);
  const auto* stream = reinterpret_cast<const std::uint16_t*>(file.data());
  const std::int64_t samples = (static_cast<std::int64_t>(file.size()) / 2 - 1) / seq;

  phalanx::AdamW optimizer(parameters, {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1});
  std::vector<double> losses, norms, wall, cpu;
  for (std::int64_t step = 0; step < steps; ++step) {
    const at::Tensor tokens = at::empty({batch, seq}, at::TensorOptions(at::kLong));
    const at::Tensor labels = at::empty({batch, seq}, at::TensorOptions(at::kLong));
    for (std::int64_t row = 0; row < batch; ++row) {
      const auto* sample = stream + ((step * batch + row) % samples) * seq;
      std::copy_n(sample, seq, tokens.mutable_data_ptr<std::int64_t>() + row * seq);
      std::copy_n(sample + 1, seq, labels.mutable_data_ptr<std::int64_t>() + row * seq);
    }
    const auto begin = std::chrono::steady_clock::now();
    const double cpu_begin = phalanx::process_cpu_seconds();
    const at::Tensor loss = model->loss(tokens, labels);
    loss.backward();
    norms.push_back(phalanx::clip_grad_norm(parameters, 1.0).value());
    optimizer.step(1e-3);
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
    cpu.push_back((phalanx::process_cpu_seconds() - cpu_begin) * 1e3);
    wall.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
  }
  const auto first = std::min(skip, steps - 1);
  cpu.erase(cpu.begin(), cpu.begin() + first);
  wall.erase(wall.begin(), wall.begin() + first);
  const double ms = median(wall);
  const nlohmann::json report = {
      {"program", "phalanx"},
      {"threads", at::get_num_threads()},
      {"parameters", config.parameter_count()},
      {"batch", batch},
      {"steps", steps},
      {"tokens_per_s", static_cast<double>(batch * seq) / ms * 1e3},
      {"step_ms_p50", ms},
      {"step_ms_min", *std::min_element(wall.begin(), wall.end())},
      {"cpu_ms_per_step", {median(cpu)}},
      {"cpu_ms_min", *std::min_element(cpu.begin(), cpu.end())},
      {"pss_mib", {static_cast<double>(phalanx::proportional_bytes()) / (1 << 20)}},
      {"peak_rss_mib", {static_cast<double>(phalanx::peak_resident_bytes()) / (1 << 20)}},
      {"losses", losses},
      {"grad_norms", norms},
  };
  std::printf("%s\n", report.dump().c_str());
  return 0;
}
