#include "cli/command.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <nlohmann/json.hpp>

#include "cli/standard_streams.h"
#include "phalanx/base/error.h"
#include "phalanx/base/error_text.h"
#include "phalanx/base/json_text.h"
#include "phalanx/base/remedy.h"
#include "phalanx/base/start_thread.h"

namespace phalanx::cli {

void print_error(std::string_view name, std::string_view text) {
  // On a terminal, clear the remains of a progress bar.
  const char* clear = ::isatty(STDERR_FILENO) != 0 ? "\r\x1b[K" : "";
  std::fputs(fmt::format("{}phalanx {}: {}\n", clear, name, with_remedy(std::string(text))).c_str(), stderr);
}

int run_command(const Command& command, const Arguments& arguments, ErrorReporter reporter) {
  const auto tell = [&](const std::exception& error, int status, bool show_help = false) {
    const std::string text = error_text(error);
    const Error in_words(text);
    const std::exception& told = text == error.what() ? error : in_words;
    if (reporter && reporter(told)) return status;
    print_error(command.name, show_help ? fmt::format("{}\nSee `phalanx {} --help`.", text, command.name) : text);
    return status;
  };
  try {
    const bool help_wanted = std::any_of(arguments.begin(), arguments.end(),
                                         [](const std::string& a) { return a == "--help" || a == "-h"; });
    if (help_wanted && !command.help.empty()) {
      fmt::print("{}", command.help);
      return status_after_output(command.name, 0);
    }
    if (arguments.empty() && command.needs_arguments) {
      fmt::print(stderr, "{}", command.help);
      return 2;
    }
    check_stack();
    return status_after_output(command.name, command.run(arguments));
  } catch (const UsageError& error) {
    return tell(error, error.exit_status(), /*show_help=*/true);
  } catch (const Error& error) {
    return tell(error, error.exit_status());
  } catch (const nlohmann::json::exception& error) {  // from a file that was edited by hand
    return tell(Error("a JSON file is malformed: " + json_value_fault(error)), 1);
  } catch (const std::bad_alloc&) {
    const std::string limits = memory_limits_text();
    return tell(Error(fmt::format("not enough memory: the system refused to give more{}{}", limits.empty() ? "" : "; ",
                                  limits)),
                1);
  } catch (const std::exception& error) {
    return tell(error, 1);
  }
}

}  // namespace phalanx::cli
