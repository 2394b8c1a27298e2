#include "phalanx/lecture/stage.h"

#include <fmt/format.h>

#include <algorithm>

#include "phalanx/base/error.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/backends/nccl/device_communicator.h"

namespace phalanx::lecture {

Rank::Rank(Stage& stage, std::shared_ptr<Communicator> world, at::Device device)
    : stage_(stage), world_(std::move(world)), device_(device) {}

void Rank::say(const std::string& title, std::string line) { lines_.emplace_back(title, std::move(line)); }

void Rank::check(bool holds, const std::string& what) { stage_.check(holds, what); }

Stage::Stage(StageOptions options) : options_(std::move(options)) {
  if (options_.ranks != 1 && options_.ranks != 2 && options_.ranks != 4) {
    throw UsageError(fmt::format("--ranks has {}: expected 1, 2 or 4", options_.ranks));
  }
}

at::Device Stage::device(int rank) const {
  return options_.device == at::kCPU ? at::kCPU : at::Device(options_.device, static_cast<at::DeviceIndex>(rank));
}

std::vector<int> Stage::worlds() const {
  std::vector<int> worlds;
  for (int ranks = 1; ranks <= options_.ranks; ranks *= 2) worlds.push_back(ranks);
  return worlds;
}

void Stage::on_ranks(int ranks, const std::function<void(Rank&)>& body) {
  std::vector<std::vector<std::pair<std::string, std::string>>> said(static_cast<std::size_t>(ranks));
  run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& host) {
    const int number = host->rank();
    const at::Device device = this->device(number);
    Rank rank(*this, options_.make_world ? options_.make_world(host, device) : make_device_communicator(host, device),
              device);
    body(rank);
    rank.comm().barrier();
    said[static_cast<std::size_t>(number)] = std::move(rank.lines_);
  });
  std::vector<std::string> titles;
  for (const auto& lines : said) {
    for (const auto& [title, line] : lines) {
      if (std::find(titles.begin(), titles.end(), title) == titles.end()) titles.push_back(title);
    }
  }
  for (const std::string& title : titles) {
    print(title);
    print_lines(title, said);
  }
}

void Stage::print_lines(const std::string& title,
                        const std::vector<std::vector<std::pair<std::string, std::string>>>& said) {
  std::vector<std::pair<std::size_t, std::string>> lines;  // rank, line
  for (std::size_t rank = 0; rank < said.size(); ++rank) {
    for (const auto& [of, line] : said[rank]) {
      if (of == title) lines.emplace_back(rank, line);
    }
  }
  const auto is_same = [&](const auto& line) { return line.second == lines.front().second; };
  if (said.size() > 1 && lines.size() == said.size() && std::all_of(lines.begin(), lines.end(), is_same)) {
    return print(fmt::format("  ranks 0-{}: {}", said.size() - 1, lines.front().second));
  }
  for (const auto& [rank, line] : lines) print(fmt::format("  rank {}: {}", rank, line));
}

void Stage::check(bool holds, const std::string& what) {
  const std::lock_guard lock(mutex_);
  all_hold_ = all_hold_ && holds;
  const auto found =
      std::find_if(checks_.begin(), checks_.end(), [&](const auto& check) { return check.first == what; });
  if (found == checks_.end()) {
    checks_.emplace_back(what, holds);
  } else {
    found->second = found->second && holds;
  }
}

void Stage::show(std::vector<Picture> pictures) {
  blocks_.push_back({.text = std::exchange(output_, ""), .pictures = std::move(pictures)});
}

std::vector<Block> Stage::take_blocks() {
  for (const auto& [what, holds] : checks_) print(fmt::format("{}: {}", holds ? "holds" : "DOES NOT HOLD", what));
  checks_.clear();
  if (!output_.empty()) show({});
  return std::exchange(blocks_, {});
}

std::string Stage::take_output() {
  std::string text;
  for (const Block& block : take_blocks()) text += block.text;
  return text;
}

std::string tensor_text(const at::Tensor& tensor, int digits) {
  if (!tensor.defined()) return "-";
  if (tensor.dim() > 1) {
    std::string rows;
    for (std::int64_t i = 0; i < tensor.size(0); ++i) rows += (i == 0 ? "" : " ") + tensor_text(tensor[i], digits);
    return rows;
  }
  const at::Tensor flat = tensor.detach().to(at::kCPU, at::kDouble).reshape({-1});
  std::string text;
  for (std::int64_t i = 0; i < flat.numel(); ++i) {
    const double value = flat.const_data_ptr<double>()[flat.stride(0) * i];
    text += fmt::format("{}{:.{}g}", i == 0 ? "" : ",", value, digits);
  }
  return "[" + text + "]";
}

std::string measured(double value) {
  if (value >= 100) return fmt::format("~{:.0f}", value);
  return fmt::format("~{:.{}f}", value, value >= 10 ? 1 : 2);
}

bool are_close(const at::Tensor& found, const at::Tensor& expected, double tolerance) {
  if (found.sizes() != expected.sizes()) return false;
  if (expected.numel() == 0) return true;
  const at::Tensor right = expected.detach().to(at::kCPU, at::kDouble);
  const at::Tensor difference = found.detach().to(at::kCPU, at::kDouble).sub(right).abs().max();
  return difference.item<double>() <= tolerance * right.abs().max().item<double>();  // not so for NaN
}

}  // namespace phalanx::lecture
