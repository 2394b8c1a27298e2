#include "phalanx/lecture/lecture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <regex>
#include <sstream>

#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"
#include "phalanx/lecture/excerpt.h"
#include "phalanx/measure/topology.h"

namespace phalanx::lecture {
namespace {

std::vector<std::string> words_of(const std::string& line) {
  std::istringstream in(line);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

const Step& step_called(const std::string& name) {
  for (const Step& step : steps()) {
    if (step.name == name) return step;
  }
  throw Error(fmt::format("the lecture has no step '{}'", name));
}

void add_output(WrittenSection& written, const std::vector<Block>& blocks) {
  written.markdown += "```text\n";
  for (const Block& block : blocks) {
    written.markdown += block.text;
    if (block.pictures.empty()) {
      written.picture_markdown += "```text\n" + block.text + "```\n";
    } else {
      written.picture_markdown += fmt::format("```picture {}\n```\n", written.pictures.size());
      written.pictures.push_back(block.pictures);
    }
  }
  written.markdown += "```\n";
}

std::string_view source_of(const std::string& file) {
  for (const Source& source : sources()) {
    if (source.file == file) return source.text->text;
  }
  throw Error(fmt::format("the lecture does not hold the source '{}'", file));
}

/// The first command that a recipe's first comment shows, in a block of its own; "" if there is none.
std::string command_block(std::string_view source) {
  constexpr std::string_view kBegin = "//   $ ";
  const std::size_t begin = source.find(kBegin);
  if (begin == std::string_view::npos) return "";
  const std::string_view rest = source.substr(begin + kBegin.size());
  return fmt::format("\n```sh\n{}\n```\n", rest.substr(0, rest.find('\n')));
}

std::string quote(const std::string& file, const std::string& code) {
  const char* language = file.ends_with(".sbatch") ? "bash" : "cpp";
  return fmt::format("[{0}](../{0}):\n\n```{1}\n{2}```\n{3}", file, language, code, command_block(source_of(file)));
}

/// `text`: what the first line and the last one contain, with " ... " between them.
std::string quoted_lines(const std::string& file, const std::string& text) {
  const std::size_t dots = text.find(" ... ");
  if (dots == std::string::npos) throw Error(fmt::format("@lines has '{}': expected FIRST ... LAST", text));
  return quote(file, lines_of(source_of(file), text.substr(0, dots), text.substr(dots + 5), file));
}

/// The code that a directive names.
std::string code_of(const std::string& line, const std::vector<std::string>& words) {
  if (words.size() == 3 && words[0] == "@code") {
    return quote(words[1], function_of(source_of(words[1]), words[2], words[1]));
  }
  if (words.size() == 4 && words[0] == "@code") {
    return quote(words[1], functions_of(source_of(words[1]), words[2], words[3], words[1]));
  }
  if (words.size() > 3 && words[0] == "@lines") {
    return quoted_lines(words[1], line.substr(line.find(words[1]) + words[1].size() + 1));
  }
  throw Error(fmt::format(
      "the lecture has the line '{}': expected @run STEP, @code FILE NAME [LAST] or @lines FILE FIRST ... LAST", line));
}

}  // namespace

WrittenSection write_section(const Section& section, const StageOptions& options) {
  WrittenSection written;
  written.section = &section;
  Stage stage(options);
  std::istringstream in{std::string(section.text->text)};
  for (std::string line; std::getline(in, line);) {
    const auto words = words_of(line);
    if (words.size() == 2 && words[0] == "@run") {
      step_called(words[1]).run(stage);
      add_output(written, stage.take_blocks());
      continue;
    }
    const std::string text = line.starts_with("@") ? code_of(line, words) : line + "\n";
    written.markdown += text;
    written.picture_markdown += text;
  }
  written.all_hold = stage.all_hold();
  return written;
}

std::vector<const Section*> chosen_sections(const std::vector<std::string>& ids) {
  std::vector<std::string> known;
  for (const Section& section : sections()) known.emplace_back(section.id);
  for (const std::string& id : ids) {
    if (std::find(known.begin(), known.end(), id) != known.end()) continue;
    throw UsageError(fmt::format("the lecture has no section '{}'{}; `phalanx lecture --list` shows them", id,
                                 did_you_mean(id, known)));
  }
  std::vector<const Section*> chosen;
  for (const Section& section : sections()) {
    if (ids.empty() || std::find(ids.begin(), ids.end(), section.id) != ids.end()) chosen.push_back(&section);
  }
  return chosen;
}

std::string list_of_sections() {
  std::string list;
  for (const Section& section : sections()) {
    list += fmt::format("part {}  {:<14} {}\n", section.part, section.id, section.title());
  }
  return list;
}

std::string terminal_text(const std::string& markdown) {
  static const std::regex link(R"(\[([^\]]+)\]\([^)]*\))"), strong(R"(\*\*([^*]+)\*\*)");
  std::string text;
  bool in_code = false;
  std::istringstream in(markdown);
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("```")) {
      in_code = !in_code;
    } else if (in_code) {
      text += line.empty() ? "\n" : "    " + line + "\n";
    } else if (line.starts_with("#")) {
      const std::string heading = line.substr(line.find(' ') + 1);
      text += heading + "\n" + std::string(heading.size(), line.starts_with("## ") ? '=' : '-') + "\n";
    } else {
      text += std::regex_replace(std::regex_replace(line, link, "$1"), strong, "$1") + "\n";
    }
  }
  return text;
}

std::string part_title(const Section& section) {
  return fmt::format("Part {}: {}", section.part, section.part == 1 ? "machines and messages" : "parallel training");
}

std::string opening() {
  constexpr std::string_view kPlace = "@when_and_where";
  const measure::Topology machine = measure::read_topology();
  const std::time_t now = std::time(nullptr);
  std::tm day{};
  gmtime_r(&now, &day);
  std::array<char, 64> date{};
  std::strftime(date.data(), date.size(), "%Y-%m-%d", &day);
  std::string text(kOpeningText.text);
  return text.replace(text.find(kPlace), kPlace.size(),
                      fmt::format("~ {}, {}, {} CPUs", date.data(), machine.cpu_model, machine.cpus.size()));
}

std::string markdown_page(const std::vector<WrittenSection>& written) {
  std::string page = opening();
  int part = 0;
  for (const WrittenSection& section : written) {
    if (section.section->part != part) {
      part = section.section->part;
      page += fmt::format("\n# {}\n", part_title(*section.section));
    }
    page += "\n" + section.markdown;
  }
  return page + "\n" + std::string(kTableText.text);
}

}  // namespace phalanx::lecture
