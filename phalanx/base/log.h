// Logging: one line per event on standard error, prefixed with time, level and rank.
//
// Only rank 0 writes info lines by default; warnings and errors are written by every rank that has one to tell. The
// level comes from PHALANX_LOG_LEVEL (debug, info, warn, error; default info; anything else is a ConfigError at the
// first line). Messages are formatted by the caller:
//
//   log::info(fmt::format("device: {}, backend: {}", device, backend));
//
// A rank is set per thread, because tests run ranks as threads; threads that set none inherit the process's.
#pragma once

#include <string_view>

namespace phalanx::log {

enum class Level { debug, info, warn, error };

void debug(std::string_view message);
void info(std::string_view message);  // rank 0 only
void info_all_ranks(std::string_view message);
void warn(std::string_view message);
void warn_once(std::string_view message);  // rank 0 only: for what is the same on all
void error(std::string_view message);

void set_level(Level level);
/// No colours from here on, on a terminal either; so it is from the start where NO_COLOR is set (no-color.org).
void disable_colors();
void set_process_rank(int rank, int world_size);
void set_thread_rank(int rank, int world_size);

}  // namespace phalanx::log
