#include "phalanx/train/profiling/kernel_profile.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "phalanx/base/file.h"

namespace phalanx::train {
namespace {

namespace kineto = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

std::atomic<bool> process_records{false};

void wait_for(at::Device device) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl impl(device.type());
  impl.synchronizeDevice(device.has_index() ? device.index() : impl.getDevice().index());
}

std::set<ActivityType> activities_of(at::Device device) {
  return {device.type() == at::kCUDA ? ActivityType::CUDA : ActivityType::CPU};
}

struct Span {
  std::uint64_t begin = 0, end = 0;  // ns
  std::uint64_t nested = 0;          // ns of it in spans within it
  std::string name;
};

struct Total {
  std::int64_t calls = 0;
  std::uint64_t ns = 0;
};

/// Adds each span's own time under its name; spans of one thread or stream nest.
void add_own_times(std::vector<Span>& spans, std::map<std::string, Total>& totals) {
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.begin != b.begin ? a.begin < b.begin : a.end > b.end; });
  std::vector<Span*> open;
  for (Span& span : spans) {
    while (!open.empty() && open.back()->end <= span.begin) open.pop_back();
    if (!open.empty()) open.back()->nested += std::min(span.end, open.back()->end) - span.begin;
    open.push_back(&span);
  }
  for (const Span& span : spans) {
    Total& total = totals[span.name];
    ++total.calls;
    total.ns += span.end - span.begin - std::min(span.nested, span.end - span.begin);
  }
}

/// Time in which at least one of the spans was under way.
std::uint64_t busy_ns(std::vector<std::pair<std::uint64_t, std::uint64_t>> spans) {
  std::sort(spans.begin(), spans.end());
  std::uint64_t busy = 0, until = 0;
  for (const auto& [begin, end] : spans) {
    if (end <= until) continue;
    busy += end - std::max(begin, until);
    until = end;
  }
  return busy;
}

std::string table_of(const std::vector<kineto::KinetoEvent>& events, at::Device device) {
  std::map<std::pair<std::uint64_t, std::int64_t>, std::vector<Span>> rows;  // by thread and stream
  std::vector<std::pair<std::uint64_t, std::uint64_t>> all;
  for (const kineto::KinetoEvent& event : events) {
    if (event.deviceType() != device.type() || event.endNs() <= event.startNs()) continue;
    rows[{event.startThreadId(), event.deviceResourceId()}].push_back(
        {.begin = event.startNs(), .end = event.endNs(), .name = event.name()});
    all.emplace_back(event.startNs(), event.endNs());
  }
  const char* const what = device.is_cpu() ? "operators" : "kernels and copies";
  if (all.empty()) return fmt::format("no {}\n", what);
  std::uint64_t begin = all.front().first, end = all.front().second;
  for (const auto& span : all) begin = std::min(begin, span.first), end = std::max(end, span.second);
  std::map<std::string, Total> totals;
  for (auto& [row, spans] : rows) add_own_times(spans, totals);

  std::vector<std::pair<std::string, Total>> sorted(totals.begin(), totals.end());
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.second.ns > b.second.ns; });
  const double duration = static_cast<double>(end - begin);
  std::string text = fmt::format("{} {} in {:.3f} ms, in {:.1f} % of which one at least was under way\n", all.size(),
                                 what, duration / 1e6, 100.0 * static_cast<double>(busy_ns(all)) / duration);
  text += "     calls         ms       %  name\n";
  for (const auto& [name, total] : sorted) {
    const auto ns = static_cast<double>(total.ns);
    fmt::format_to(std::back_inserter(text), "{:>10} {:>10.3f} {:>7.2f}  {}\n", total.calls, ns / 1e6,
                   100.0 * ns / duration, name);
  }
  return text;
}

}  // namespace

std::unique_ptr<KernelProfile> KernelProfile::start(at::Device device) {
  if (process_records.exchange(true)) return nullptr;
  try {
    return std::unique_ptr<KernelProfile>(new KernelProfile(device));
  } catch (...) {
    process_records = false;
    throw;
  }
}

KernelProfile::KernelProfile(at::Device device) : device_(device) {
  wait_for(device_);
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  kineto::prepareProfiler(config, activities_of(device_));
  kineto::enableProfiler(config, activities_of(device_));
  records_ = true;
}

KernelProfile::~KernelProfile() {
  if (!records_) return;
  try {
    kineto::disableProfiler();
  } catch (...) {  // what was recorded is not wanted
  }
  process_records = false;
}

void KernelProfile::write(const std::string& path) {
  wait_for(device_);
  const auto result = kineto::disableProfiler();
  records_ = false;
  process_records = false;
  // The profiler appends; a file that is there would spoil the trace.
  const std::string unfinished = path + ".json.part";
  posix_file_system().remove_all(unfinished);
  result->save(unfinished);
  posix_file_system().rename(unfinished, path + ".json");
  replace_file(path + ".txt", table_of(result->events(), device_));
}

}  // namespace phalanx::train
