// Logging: one line per event on standard error, prefixed with time, level and rank.
//
// By default only rank 0 writes info lines. Every rank writes its warnings and errors. The level comes from
// PHALANX_LOG_LEVEL (debug, info, warn, error; default info; any other value is a ConfigError at the first line). The
// caller formats the message:
//
//   log::info(fmt::format("device: {}, backend: {}", device, backend));
//
// The rank is set per thread, because tests run ranks as threads. Threads that set none use the rank of the process.
#pragma once

#include <string_view>

namespace phalanx::log {

enum class Level { debug, info, warn, error };

void debug(std::string_view message);
void info(std::string_view message);  // rank 0 only
void info_all_ranks(std::string_view message);
void warn(std::string_view message);
void warn_once(std::string_view message);  // rank 0 only: for warnings that are the same on all ranks
void error(std::string_view message);

void set_level(Level level);
/// Switches colours off, also on a terminal. If NO_COLOR is set (no-color.org), they are off from the start.
void disable_colors();
/// Whether lines have colours: on a terminal, unless they are switched off.
bool has_colors();
void set_process_rank(int rank, int world_size);
void set_thread_rank(int rank, int world_size);

}  // namespace phalanx::log
