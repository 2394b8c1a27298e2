#include "phalanx/train/metrics_logger.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>
#include <system_error>
#include <utility>

#include "phalanx/base/file.h"
#include "phalanx/base/log.h"
#include "phalanx/observe/metrics.h"
#include "phalanx/observe/tensorboard.h"

namespace phalanx::train {
namespace {

constexpr const char* kHistory = "history";

/// By TRL's names.
std::vector<std::pair<std::string, double>> named(const PreferenceMetrics& of) {
  return {{"rewards/chosen", of.chosen},
          {"rewards/rejected", of.rejected},
          {"rewards/accuracies", of.accuracy},
          {"rewards/margins", of.margin()}};
}

nlohmann::json parsed_run(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) return nlohmann::json::object();
  auto run = nlohmann::json::parse(read_file(path), nullptr, /*allow_exceptions=*/false);
  return run.is_object() ? run : nlohmann::json::object();
}

std::string id_of(const nlohmann::json& run) {
  const auto id = run.find("id");
  return id != run.end() && id->is_string() ? id->get<std::string>() : std::string();
}

/// run.json is moved last: from it the next start sees what an interruption left.
void move_run_files(const std::filesystem::path& from, const std::filesystem::path& to) {
  FileSystem& fs = posix_file_system();
  for (const char* name : {"metrics.jsonl", "run.json"}) {
    if (std::filesystem::exists(from / name)) fs.rename(from / name, to / name);
  }
  fs.sync_directory(to);
  fs.sync_directory(from);
}

std::filesystem::path earlier_folder(const std::filesystem::path& folder, int number) {
  return folder / fmt::format("earlier-{}", number);
}

/// The first number that is not used.
int free_earlier_number(const std::filesystem::path& folder) {
  int number = 1;
  while (std::filesystem::exists(earlier_folder(folder, number))) ++number;
  return number;
}

/// Moves the files of another run away, and moves those of this run back if they were moved before. Returns log lines.
std::vector<std::string> make_room(const std::filesystem::path& folder, const MetricsLoggerOptions& options) {
  const auto run_path = folder / "run.json";
  if (options.id.empty() ||
      (!std::filesystem::exists(run_path) && !std::filesystem::exists(folder / "metrics.jsonl"))) {
    return {};
  }
  const std::string id = id_of(parsed_run(run_path));
  if (id.empty() ? options.resumed_step.has_value() : id == options.id) return {};
  const int number = free_earlier_number(folder);
  const auto into = earlier_folder(folder, number);
  posix_file_system().make_directory(into);
  move_run_files(folder, into);
  std::vector<std::string> notes = {fmt::format(
      "{}: its run.json and metrics.jsonl were of another run, and are kept in {}", folder.string(), into.string())};
  for (int before = number - 1; before > 0 && options.resumed_step; --before) {
    const auto from = earlier_folder(folder, before);
    if (id_of(parsed_run(from / "run.json")) != options.id) continue;
    move_run_files(from, folder);
    notes.push_back(fmt::format("{}: this run's own are back from {}", folder.string(), from.string()));
    break;
  }
  return notes;
}

/// Whether a metrics.jsonl leads to the resumed step. One without any step leads to every step.
bool leads_to_step(const std::filesystem::path& metrics, const MetricsLoggerOptions& options) {
  bool has_step = false;
  std::istringstream lines(read_file(metrics));
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const bool is_step = json.is_object() && json.contains("loss") && json.contains("step") && json["step"].is_number();
    if (!is_step) continue;
    has_step = true;
    if (json["step"] == *options.resumed_step && json["loss"] == *options.resumed_loss) return true;
  }
  return !has_step;
}

/// Moves a curve of another branch away, and replaces it by the stored curve that leads to this step, if there is one.
std::vector<std::string> make_room_for_curve(const std::filesystem::path& folder, const MetricsLoggerOptions& options) {
  const auto metrics = folder / "metrics.jsonl";
  if (!options.resumed_step || !options.resumed_loss || !std::filesystem::exists(metrics)) return {};
  if (leads_to_step(metrics, options)) return {};
  std::vector<std::filesystem::path> kept;
  for (const std::filesystem::path& beside : {folder, std::filesystem::path(options.checkpoint_folder)}) {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(beside, error)) {
      const auto path = entry.path() / "metrics.jsonl";
      if (std::filesystem::exists(path, error) && leads_to_step(path, options)) kept.push_back(path);
    }
  }
  const auto into = earlier_folder(folder, free_earlier_number(folder));
  FileSystem& fs = posix_file_system();
  fs.make_directory(into);
  fs.rename(metrics, into / "metrics.jsonl");
  fs.sync_directory(into);
  std::vector<std::string> notes = {
      fmt::format("{}: it does not lead to step {} with a loss of {}, which this run goes on from: it is of another "
                  "branch, and kept in {}",
                  metrics.string(), *options.resumed_step, *options.resumed_loss, into.string())};
  if (!kept.empty()) {
    const auto from = *std::ranges::max_element(kept);
    replace_file(metrics, read_file(from), fs);
    notes.push_back(fmt::format("{}: the curve goes on from that in {}", metrics.string(), from.string()));
  }
  return notes;
}

std::vector<std::string> make_all_room(const std::filesystem::path& folder, const MetricsLoggerOptions& options) {
  std::vector<std::string> notes = make_room(folder, options);
  for (std::string& note : make_room_for_curve(folder, options)) notes.push_back(std::move(note));
  return notes;
}

}  // namespace

double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

double mean_of(const std::vector<double>& by_rank) {
  return by_rank.empty() ? 0
                         : std::accumulate(by_rank.begin(), by_rank.end(), 0.0) / static_cast<double>(by_rank.size());
}

class MetricsLogger::Impl {
 public:
  Impl(const std::filesystem::path& folder, const MetricsLoggerOptions& options)
      : run_path(folder / "run.json"),
        notes(make_all_room(folder, options)),
        metrics(folder / "metrics.jsonl", {.resumed_step = options.resumed_step}) {
    if (!options.tensorboard_folder.empty()) {
      board = std::make_unique<observe::TensorBoardWriter>(
          folder / options.tensorboard_folder,
          // All points there belong to another run.
          observe::TensorBoardOptions{.resumed_step = notes.empty() ? options.resumed_step : std::nullopt});
    }
    if (options.resumed_step && std::filesystem::exists(run_path)) {
      const auto before = nlohmann::json::parse(read_file(run_path), nullptr, /*allow_exceptions=*/false);
      if (before.is_object() && (!before.contains(kHistory) || before[kHistory].is_array()))
        run = before;
      else
        set_aside();
      // The results of steps that no longer belong to this run.
      const auto done = run.find("steps_done");
      if (done != run.end() && done->is_number_integer() && done->get<std::int64_t>() > *options.resumed_step) {
        for (const char* key : {"steps_done", "validation_loss", "sample"}) run.erase(key);
      }
    }
    if (!options.id.empty()) run["id"] = options.id;
  }

  // A file that cannot be read is moved aside, not overwritten, so that the user can look at it.
  void set_aside() const {
    const std::filesystem::path aside = run_path.string() + ".damaged";
    std::filesystem::rename(run_path, aside);
    log::warn(
        fmt::format("{} is damaged (expected a JSON object with the list \"{}\"): set aside as {}; a new one is begun, "
                    "without the history of the run",
                    run_path.string(), kHistory, aside.filename().string()));
  }

  std::filesystem::path run_path;
  std::vector<std::string> notes;
  observe::MetricsWriter metrics;
  std::unique_ptr<observe::TensorBoardWriter> board;
  nlohmann::json run = nlohmann::json::object();
};

MetricsLogger::MetricsLogger(std::string folder, const MetricsLoggerOptions& options) : folder_(std::move(folder)) {
  posix_file_system().make_directory(folder_);
  impl_ = std::make_unique<Impl>(folder_, options);
}

MetricsLogger::~MetricsLogger() = default;

const std::vector<std::string>& MetricsLogger::notes() const noexcept { return impl_->notes; }

void MetricsLogger::describe(const nlohmann::json& values) {
  impl_->run.update(values);
  // Text that a model generated need not be valid UTF-8.
  replace_file(impl_->run_path, impl_->run.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

void MetricsLogger::add_to(const std::string& list, const nlohmann::json& value) {
  nlohmann::json& values = impl_->run[list];
  if (!values.is_array()) values = nlohmann::json::array();
  values.push_back(value);
  describe(nlohmann::json::object());
}

void MetricsLogger::write_step(const StepMetrics& m, bool to_tensorboard) {
  nlohmann::ordered_json line = {
      {"step", m.step}, {"loss", m.loss},       {"max_loss", m.max_loss},         {"grad_norm", m.grad_norm},
      {"lr", m.lr},     {"seconds", m.seconds}, {"data_seconds", m.data_seconds}, {"tokens", m.tokens},
      {"tps", m.tps},   {"tflops", m.tflops}};
  if (m.mfu_percent) line["mfu_percent"] = *m.mfu_percent;
  if (m.loss_scale) line["loss_scale"] = *m.loss_scale;
  if (m.skipped) line["skipped"] = true;
  line["memory_gib"] = m.memory_gib;
  line["cpu_seconds"] = m.cpu_seconds;
  if (!m.exposed_seconds.empty()) {
    line["comm_seconds"] = m.comm_seconds;
    line["exposed_seconds"] = m.exposed_seconds;
    line["exposed_percent"] = m.exposed_percent;
  }
  for (const data::SetCount& set : m.sets) {
    line["sets"][set.name] = {{"sequences", set.sequences}, {"epochs", set.epochs}};
  }
  if (m.preferences) {
    for (const auto& [name, value] : named(*m.preferences)) line[name] = value;
  }
  if (!m.expert_load.empty()) {
    line["expert_load"] = m.expert_load;
    line["expert_load_max"] = std::ranges::max(m.expert_load);
    line["expert_load_mean"] = mean_of(m.expert_load);
  }
  if (m.expert_dropped) line["expert_dropped"] = *m.expert_dropped;
  line["time"] = unix_time();
  impl_->metrics.write(line);
  if (!impl_->board || !to_tensorboard) return;

  auto& board = *impl_->board;
  board.add_scalar("loss_metrics/global_avg_loss", m.loss, m.step);
  board.add_scalar("loss_metrics/global_max_loss", m.max_loss, m.step);
  if (!m.skipped) board.add_scalar("grad_norm", m.grad_norm, m.step);
  if (m.loss_scale) board.add_scalar("loss_scale", *m.loss_scale, m.step);
  board.add_scalar("lr", m.lr, m.step);
  board.add_scalar("throughput(tps)", m.tps, m.step);
  board.add_scalar("tflops", m.tflops, m.step);
  if (m.mfu_percent) board.add_scalar("mfu(%)", *m.mfu_percent, m.step);
  board.add_scalar("time_metrics/end_to_end(s)", m.seconds, m.step);
  board.add_scalar("time_metrics/data_loading(s)", m.data_seconds, m.step);
  board.add_scalar("time_metrics/data_loading(%)", 100.0 * m.data_seconds / m.seconds, m.step);
  if (!m.exposed_seconds.empty()) {
    board.add_scalar("time_metrics/communication(s)", mean_of(m.comm_seconds), m.step);
    board.add_scalar("time_metrics/exposed_communication(s)", mean_of(m.exposed_seconds), m.step);
    board.add_scalar("time_metrics/exposed_communication(%)", m.exposed_percent, m.step);
  }
  for (const data::SetCount& set : m.sets) {
    board.add_scalar("data/epochs/" + set.name, set.epochs, m.step);
  }
  if (m.preferences) {
    for (const auto& [name, value] : named(*m.preferences)) board.add_scalar(name, value, m.step);
  }
  if (!m.expert_load.empty()) {
    board.add_scalar("moe/expert_load_max", std::ranges::max(m.expert_load), m.step);
    board.add_scalar("moe/expert_load_mean", mean_of(m.expert_load), m.step);
  }
  if (m.expert_dropped) board.add_scalar("moe/expert_dropped", *m.expert_dropped, m.step);
  board.add_scalar("memory/max_reserved(GiB)", m.memory_gib.at(0), m.step);
  board.flush();
}

void MetricsLogger::write_validation(const ValidationMetrics& m) {
  nlohmann::ordered_json line = {
      {"step", m.step}, {"validation_loss", m.loss}, {"tokens", m.tokens}, {"seconds", m.seconds}};
  if (m.preferences) {
    for (const auto& [name, value] : named(*m.preferences)) line[name] = value;
  }
  for (const ValidationMetrics::Set& set : m.sets) {
    line["sets"][set.name] = {{"loss", set.loss}, {"tokens", set.tokens}, {"labels", set.labels}};
  }
  line["time"] = unix_time();
  impl_->metrics.write(line);
  if (!impl_->board) return;
  impl_->board->add_scalar("validation_metrics/global_avg_loss", m.loss, m.step);
  if (m.preferences) {
    for (const auto& [name, value] : named(*m.preferences)) {
      impl_->board->add_scalar("validation_metrics/" + name, value, m.step);
    }
  }
  for (const ValidationMetrics::Set& set : m.sets) {
    impl_->board->add_scalar("validation_metrics/loss/" + set.name, set.loss, m.step);
  }
  impl_->board->flush();
}

}  // namespace phalanx::train
