#include "phalanx/train/run_memory.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <pthread.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <map>
#include <new>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include "phalanx/base/process_stats.h"
#include "phalanx/comm/liveness/process_probe.h"
#include "phalanx/config/training_shape.h"
#include "phalanx/plan/bytes_text.h"
#include "phalanx/tensor/counting_allocator.h"

namespace phalanx::train {
namespace {

std::string domain_of_card(c10::Device device) {
  const std::string node = node_identity();
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return node.empty() ? "" : fmt::format("card {} {}", node, card_name(device, visible ? visible : ""));
}

using nlohmann::json;
using observe::MemoryCategory;
using observe::MemoryCounts;

// On a device the host's limits hardly matter, because everything large is on the device.
std::vector<MemoryLimit> limits_here(c10::Device device, const std::filesystem::path& root) {
  if (device.is_cpu()) return memory_limits(root);
  at::globalContext().lazyInitDevice(device.type());
  const auto [free, total] = c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index());
  return {{fmt::format("memory of {}", device.str()), MemoryLimit::Counts::everything, MemoryLimit::SharedBy::device,
           total, total - free, domain_of_card(device)}};
}

// The value of OMP_STACKSIZE ("16M", "512 k", without a unit kibibytes), or the default of any thread.
std::int64_t thread_stack_bytes() {
  if (const char* given = std::getenv("OMP_STACKSIZE")) {
    char* end = nullptr;
    const long long number = std::strtoll(given, &end, 10);
    while (std::isspace(static_cast<unsigned char>(*end)) != 0) ++end;
    const int unit = std::tolower(static_cast<unsigned char>(*end));
    const int shift = unit == 'b' ? 0 : unit == 'm' ? 20 : unit == 'g' ? 30 : 10;
    constexpr std::int64_t kMost = std::int64_t{1} << 40;
    if (end != given && number > 0) return std::min<std::int64_t>(number, kMost >> shift) << shift;
  }
  pthread_attr_t attributes;
  std::size_t bytes = 0;
  if (pthread_attr_init(&attributes) != 0) return 0;
  pthread_attr_getstacksize(&attributes, &bytes);
  pthread_attr_destroy(&attributes);
  return static_cast<std::int64_t>(bytes);
}

json to_json(const MemoryLimit& limit) {
  return {{"name", limit.name},
          {"counts", static_cast<int>(limit.counts)},
          {"shared_by", static_cast<int>(limit.shared_by)},
          {"bytes", limit.bytes},
          {"used", limit.used},
          {"domain", limit.domain}};
}

MemoryLimit limit_from(const json& object) {
  return {object["name"].get<std::string>(),
          static_cast<MemoryLimit::Counts>(object["counts"].get<int>()),
          static_cast<MemoryLimit::SharedBy>(object["shared_by"].get<int>()),
          object["bytes"].get<std::uint64_t>(),
          object["used"].get<std::uint64_t>(),
          object["domain"].get<std::string>()};
}

json to_json(const MemoryCounts& counts) {
  json object = {{"total", counts.total()}, {"shared", counts.shared}};
  for (std::size_t c = 0; c < observe::kMemoryCategories; ++c) {
    object[std::string(observe::name_of(static_cast<MemoryCategory>(c)))] = counts.bytes[c];
  }
  return object;
}

MemoryCounts counts_from(const json& object) {
  MemoryCounts counts;
  for (std::size_t c = 0; c < observe::kMemoryCategories; ++c) {
    counts.bytes[c] = object[std::string(observe::name_of(static_cast<MemoryCategory>(c)))].get<std::int64_t>();
  }
  counts.shared = object["shared"].get<std::int64_t>();
  return counts;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// libtorch's text begins with the location in its sources.
std::string reason_of(const std::exception& error) {
  const std::string text = first_line(error.what());
  const std::size_t begin = text.find("DefaultCPUAllocator");
  return begin == std::string::npos ? text : text.substr(begin);
}

}  // namespace

plan::TrainingShape training_shape(const config::TrainConfig& config, const config::RunPlan& plan,
                                   const Communicator& world, c10::Device device, bool resumes) {
  plan::TrainingShape shape = config::training_shape(config, plan);
  shape.on_device = !device.is_cpu();
  shape.shares_memory = device.is_cpu() && world.backend_name() == "shm";
  shape.resumes = resumes;
  shape.thread_stacks = (at::get_num_threads() - 1) * thread_stack_bytes();
  return shape;
}

std::string card_name(c10::Device device, std::string_view visible) {
  std::string_view rest = visible;
  for (int index = 0; !rest.empty(); ++index) {
    const std::size_t comma = std::min(rest.find(','), rest.size());
    if (index == device.index()) return fmt::format("{} {}", c10::DeviceTypeName(device.type()), rest.substr(0, comma));
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  return fmt::format("{} {}", c10::DeviceTypeName(device.type()), device.index());
}

bool is_memory_failure(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return true;
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr) return true;
  if (const auto* system = dynamic_cast<const std::system_error*>(&error)) {
    return system->code() == std::errc::not_enough_memory ||
           system->code() == std::errc::resource_unavailable_try_again;  // a thread without memory for its stack
  }
  const std::string text = error.what();
  const auto says = [&](const char* words) { return text.find(words) != std::string::npos; };
  if (dynamic_cast<const c10::Error*>(&error) != nullptr) return says("not enough memory") || says("allocate memory");
  return says("shared memory is not available") || says("no memory for a copy of the state");
}

RunMemory::RunMemory(const config::TrainConfig& config, const config::RunPlan& plan,
                     std::shared_ptr<Communicator> world, c10::Device device, bool resumes, std::filesystem::path root)
    : checks_(config.memory.check),
      world_(std::move(world)),
      device_(device),
      root_(std::move(root)),
      shape_(training_shape(config, plan, *world_, device, resumes)),
      predicted_(plan::predict_memory(shape_)),
      ranks_(exchange_limits()) {
  const std::string& process = ranks_[static_cast<std::size_t>(world_->rank())].process;
  ranks_in_process_ = static_cast<int>(
      std::ranges::count_if(ranks_, [&](const RankLimits& other) { return other.process == process; }));
  install_counting_allocator();
  observe::reset_peak_memory_stats();
}

std::vector<RunMemory::RankLimits> RunMemory::exchange_limits() const {
  const std::string process = ProcessProbe::identity();
  json mine = {{"process", process}, {"limits", json::array()}};
  for (const MemoryLimit& limit : limits_here(device_, root_)) {
    mine["limits"].push_back(to_json(limit));
    mine["limits"].back()["from"] =
        limit.domain.empty() ? fmt::format("process {} {}", process, limit.name) : limit.domain;
  }
  std::vector<json> told;
  std::map<std::string, std::int64_t> takers;
  std::set<std::string> of_first;  // limits that rank 0 is under
  for (const std::string& text : world_->all_gather_bytes(mine.dump())) {
    told.push_back(json::parse(text));
    for (const json& limit : told.back()["limits"]) {
      ++takers[limit["from"].get<std::string>()];
      if (told.size() == 1) of_first.insert(limit["from"].get<std::string>());
    }
  }
  std::vector<RankLimits> ranks;
  for (const json& rank : told) {
    ranks.push_back({rank["process"].get<std::string>(), {}});
    for (const json& limit : rank["limits"]) {
      const std::string from = limit["from"].get<std::string>();
      ranks.back().limits.push_back({limit_from(limit), takers[from], of_first.contains(from)});
    }
  }
  return ranks;
}

std::optional<std::pair<std::size_t, plan::MemoryShortage>> RunMemory::worst_shortage(
    const plan::TrainingMemory& memory) const {
  std::optional<std::pair<std::size_t, plan::MemoryShortage>> worst;
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    auto shortage = plan::find_shortage(memory, ranks_[r].limits);
    if (shortage && (!worst || shortage->missing > worst->second.missing)) worst = {r, *std::move(shortage)};
  }
  return worst;
}

std::string RunMemory::remedies_text(const std::function<bool(const plan::TrainingMemory&)>& fits) const {
  const std::vector<std::string> found = plan::remedies(shape_, fits);
  const std::string saving = plan::largest_saving(shape_);
  const std::string most = saving.empty() ? "" : "\n  saves most: " + saving;
  if (found.empty()) {
    return fmt::format(
        "no layout of {} rank{}, recomputation or smaller batch makes it fit: use a smaller model or {}{}",
        world_->size(), world_->size() == 1 ? "" : "s",
        world_->size() == 1 ? "several ranks with parallelism.data_parallel_shard_degree = -1"
                            : "more ranks with parallelism.data_parallel_shard_degree = -1",
        most);
  }
  return fmt::format("it would fit with {}{}", fmt::join(found, "\n    or with "), most);
}

void RunMemory::check() const {
  if (!checks_) return;
  // Every rank knows all limits. One rank decides, so that the ranks agree whatever else differs.
  std::string message;
  if (const auto worst = worst_shortage(predicted_); worst && world_->rank() == 0) {
    message = fmt::format(
        "not enough memory: rank {} {}\n  {}\n  nothing has been allocated; memory.check = false starts all the same",
        worst->first, plan::shortage_text(worst->second, predicted_),
        remedies_text([&](const plan::TrainingMemory& memory) { return !worst_shortage(memory); }));
  }
  message = world_->broadcast_bytes(message);
  if (!message.empty()) throw MemoryError(message);
}

void RunMemory::explain_failures(const std::function<void()>& body) const {
  std::string reason;
  try {
    body();
    return;
  } catch (const MemoryError&) {
    throw;
  } catch (const std::exception& error) {
    if (!is_memory_failure(error)) throw;
    reason = reason_of(error);
  }
  // What the limits say now, including what is left of the run's tensors.
  std::string limits;
  for (const MemoryLimit& limit : limits_here(device_, root_)) limits += fmt::format("\n  limit: {}", limit.text());
  const auto worst = worst_shortage(predicted_);
  const std::string missing =
      worst ? fmt::format("\n  {} were missing from the beginning: rank {} {}", plan::bytes_text(worst->second.missing),
                          worst->first, first_line(plan::shortage_text(worst->second, predicted_)))
            : "";
  throw MemoryError(fmt::format("not enough memory: an allocation failed on rank {}: {}{}{}\n  {}\n  {}\n  {}",
                                world_->rank(), reason, missing, limits, plan::prediction_text(predicted_),
                                plan::comparison_text(predicted_, peak({})),
                                remedies_text([&](const plan::TrainingMemory& memory) {
                                  return memory.total() < predicted_.total() && !worst_shortage(memory);
                                })));
}

// The device's allocator knows the peak, and the run knows what it holds; the rest was temporary.
MemoryCounts RunMemory::peak(const MemoryCounts& held) const {
  MemoryCounts counts = observe::max_memory_allocated();
  if (!device_.is_cpu()) {
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    counts = held;
    counts[MemoryCategory::activations] =
        c10::getDeviceAllocator(device_.type())->getDeviceStats(device_.index()).allocated_bytes[kAll].peak -
        held.total();
    return counts;
  }
  for (std::int64_t& bytes : counts.bytes) bytes /= ranks_in_process_;
  counts.shared /= ranks_in_process_;
  return counts;
}

RunMemory::Report RunMemory::finish(const MemoryCounts& held) const {
  json mine = to_json(peak(held));
  mine["peak_rss"] = peak_resident_bytes();
  mine["pss"] = proportional_bytes();
  const std::vector<std::string> told = world_->gather_bytes(mine.dump());
  if (told.empty()) return {};
  json measured = json::array();
  for (const std::string& text : told) measured.push_back(json::parse(text));
  const auto total_of = [](const json& rank) { return rank["total"].get<std::int64_t>(); };
  const auto fullest = std::ranges::max_element(measured, {}, total_of);
  Report report;
  const MemoryCounts first = counts_from(measured[0]);
  report.lines.push_back(fmt::format("peak memory: {}", first.text()));
  // Ranks of a pipeline differ; the prediction is for the one with the most memory.
  const std::int64_t compared = shape_.pipeline ? total_of(*fullest) : first.total();
  report.lines.push_back(fmt::format(
      "  predicted{}: {} ({:+.1f} %)", shape_.pipeline ? ", of the fullest rank" : "", predicted_.peak.text(),
      100.0 * (static_cast<double>(predicted_.peak.total()) / static_cast<double>(std::max<std::int64_t>(compared, 1)) -
               1)));
  if (measured.size() > 1) {
    report.lines.push_back(fmt::format("  the most of any rank: {} on rank {}", plan::bytes_text(total_of(*fullest)),
                                       fullest - measured.begin()));
  }
  const auto mebibytes = [&](const char* key) {
    json list = json::array();
    for (const json& rank : measured) list.push_back(rank[key].get<std::uint64_t>() >> 20);
    return list;
  };
  json memory = {{"measured", measured},
                 {"predicted", to_json(predicted_.peak)},
                 {"predicted_beside_tensors", predicted_.runtime},
                 {"predicted_buffers", json::object()}};
  for (const auto& [name, bytes] : predicted_.buffers) memory["predicted_buffers"][name] = bytes;
  report.record = std::make_shared<json>(
      json{{"memory", memory}, {"peak_rss_mib", mebibytes("peak_rss")}, {"pss_mib", mebibytes("pss")}});
  return report;
}

}  // namespace phalanx::train
