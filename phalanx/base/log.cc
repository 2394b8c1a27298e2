#include "phalanx/base/log.h"

#include <fmt/format.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>

#include "phalanx/base/env.h"

namespace phalanx::log {
namespace {

struct RankOfLog {
  int rank = 0;
  int world_size = 1;
};
std::atomic<int> process_rank{0};
std::atomic<int> process_world_size{1};
thread_local std::unique_ptr<RankOfLog> thread_rank;

RankOfLog current_rank() {
  if (thread_rank) return *thread_rank;
  return {process_rank.load(), process_world_size.load()};
}

spdlog::level::level_enum level_from_environment() {
  return spdlog::level::from_str(env_choice("PHALANX_LOG_LEVEL", {"debug", "info", "warn", "error"}).value_or("info"));
}

// Never destroyed: a thread, such as the flight recorder's, may log while the process ends.
spdlog::logger& logger() {
  static spdlog::logger& instance = []() -> spdlog::logger& {
    const auto colors = env_string("NO_COLOR") ? spdlog::color_mode::never : spdlog::color_mode::automatic;
    auto* const made = new spdlog::logger("phalanx", std::make_shared<spdlog::sinks::stderr_color_sink_mt>(colors));
    // On a terminal each line first clears the remains of a progress bar.
    const std::string clear = isatty(STDERR_FILENO) != 0 ? "\r\x1b[K" : "";
    made->set_pattern(clear + "[phalanx] %Y-%m-%d %H:%M:%S - %^%l%$ - %v");
    made->set_level(level_from_environment());
    return *made;
  }();
  return instance;
}

void write_line(spdlog::level::level_enum level, std::string_view message) {
  const RankOfLog where = current_rank();
  if (where.world_size > 1) {
    logger().log(level, "rank {}: {}", where.rank, message);
  } else {
    logger().log(level, "{}", message);
  }
}

}  // namespace

void debug(std::string_view message) { write_line(spdlog::level::debug, message); }
void info(std::string_view message) {
  if (current_rank().rank == 0) logger().log(spdlog::level::info, "{}", message);
}
void info_all_ranks(std::string_view message) { write_line(spdlog::level::info, message); }
void warn(std::string_view message) { write_line(spdlog::level::warn, message); }
void warn_once(std::string_view message) {
  if (current_rank().rank == 0) logger().log(spdlog::level::warn, "{}", message);
}
void error(std::string_view message) { write_line(spdlog::level::err, message); }

void set_level(Level level) {
  switch (level) {
    case Level::debug:
      logger().set_level(spdlog::level::debug);
      break;
    case Level::info:
      logger().set_level(spdlog::level::info);
      break;
    case Level::warn:
      logger().set_level(spdlog::level::warn);
      break;
    case Level::error:
      logger().set_level(spdlog::level::err);
      break;
  }
}
void disable_colors() {
  for (const auto& sink : logger().sinks()) {
    static_cast<spdlog::sinks::stderr_color_sink_mt&>(*sink).set_color_mode(spdlog::color_mode::never);
  }
}
bool has_colors() {
  return static_cast<spdlog::sinks::stderr_color_sink_mt&>(*logger().sinks().front()).should_color();
}
void set_process_rank(int rank, int world_size) {
  process_rank = rank;
  process_world_size = world_size;
}
void set_thread_rank(int rank, int world_size) {
  thread_rank = std::make_unique<RankOfLog>(RankOfLog{rank, world_size});
}

}  // namespace phalanx::log
