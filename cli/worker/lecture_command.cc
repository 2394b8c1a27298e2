#include "cli/worker/lecture_command.h"

#include <fmt/format.h>

#include <cstdio>
#include <optional>

#include "cli/parse_options.h"
#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/comm/device/device_streams.h"
#include "phalanx/lecture/html_page.h"
#include "phalanx/lecture/lecture.h"

namespace phalanx::cli {

const std::string_view kLectureHelp =
    R"(usage: phalanx lecture [--section ID ...] [--ranks N] [--device DEVICE] [options]

A lecture on distributed training that runs: machines and messages, then parallel training. Each section has the idea, a
picture, the code that matters, the lines of every rank, what to notice, and the checks that prove it. Ranks are threads
of this process. A value behind a ~ is measured.

      --section ID      only this one; may be repeated
      --list            the sections, without running them
      --ranks N         1, 2 or 4: of steps that run one number of ranks, and the most of the others (4; on GPUs as many
                        as there are)
      --device DEVICE   cpu or cuda; rank r computes on cuda:r. Default: cuda if there are GPUs
      --step            waits for Enter after each section; q ends
      --html FILE       writes one page, which loads nothing
      --markdown FILE   writes docs/lecture.md

  phalanx lecture --step
  phalanx lecture --section collectives --ranks 2
  phalanx lecture --html lecture.html

Ends with status 1 if a check does not hold.
)";

namespace {

struct LectureArguments {
  std::vector<std::string> sections;
  std::optional<int> ranks;
  std::string device, html, markdown;
  bool list = false, step = false;
};

LectureArguments parse_lecture(const Arguments& arguments) {
  LectureArguments parsed;
  CLI::App app;
  add_repeated_option(app, "--section", parsed.sections);
  app.add_flag("--list", parsed.list);
  app.add_option("--ranks", parsed.ranks);
  app.add_option("--device", parsed.device);
  app.add_flag("--step", parsed.step);
  app.add_option("--html", parsed.html);
  app.add_option("--markdown", parsed.markdown);
  parse_options(app, arguments);
  if (!parsed.device.empty() && parsed.device != "cpu" && parsed.device != "cuda") {
    throw UsageError(fmt::format("--device has '{}': expected cpu or cuda", parsed.device));
  }
  return parsed;
}

lecture::StageOptions stage_options(const LectureArguments& parsed) {
  const int devices = cuda_device_count();
  const bool cuda = parsed.device == "cuda" || (parsed.device.empty() && devices > 0);
  if (cuda && devices == 0) {
    throw UsageError("--device cuda: this libtorch has no CUDA, or this node no GPU; take --device cpu");
  }
  const int most = !cuda || devices >= 4 ? 4 : devices >= 2 ? 2 : devices;
  const int ranks = parsed.ranks.value_or(most);
  if (cuda && ranks > devices) {
    throw UsageError(fmt::format(
        "--device cuda with --ranks {}: expected a GPU for each rank, found {}; take --ranks {} or --device cpu", ranks,
        devices, most));
  }
  return {.ranks = ranks, .device = cuda ? at::kCUDA : at::kCPU};
}

/// False: no more sections are wanted.
bool wait_for_enter() {
  fmt::print("[Enter: the next section; q: the end] ");
  std::fflush(stdout);
  const int first = std::getchar();
  for (int c = first; c != '\n' && c != EOF;) c = std::getchar();
  return first != 'q';
}

}  // namespace

int lecture_command(const Arguments& arguments) {
  const LectureArguments parsed = parse_lecture(arguments);
  if (parsed.list) return fmt::print("{}", lecture::list_of_sections()), 0;
  const auto chosen = lecture::chosen_sections(parsed.sections);
  const lecture::StageOptions options = stage_options(parsed);
  lecture::Stage check_options(options);  // before anything is printed
  const bool to_terminal = parsed.html.empty() && parsed.markdown.empty();
  std::vector<lecture::WrittenSection> written;
  std::string failed;
  for (const lecture::Section* section : chosen) {
    written.push_back(lecture::write_section(*section, options));
    if (!written.back().all_hold) failed += fmt::format("{}{}", failed.empty() ? "" : ", ", section->id);
    if (to_terminal) fmt::print("{}\n", lecture::terminal_text(written.back().markdown));
    if (to_terminal && parsed.step && section != chosen.back() && !wait_for_enter()) break;
  }
  if (!parsed.html.empty()) write_file(parsed.html, lecture::html_page(written));
  if (!parsed.markdown.empty()) write_file(parsed.markdown, lecture::markdown_page(written));
  if (!failed.empty()) throw Error("a check does not hold in: " + failed);
  return 0;
}

}  // namespace phalanx::cli
