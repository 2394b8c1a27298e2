#include "phalanx/measure/gpu_links.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <sstream>

#include "phalanx/base/error.h"
#include "phalanx/base/human.h"
#include "phalanx/base/start_thread.h"

namespace phalanx::measure {
namespace {

std::vector<std::string> split(const std::string& line, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(line);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

std::string trimmed(const std::string& text) {
  const std::size_t begin = text.find_first_not_of(" \t\r");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

/// Removes the terminal's escape sequences: the heading is underlined.
std::string plain(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\033') {
      while (i < text.size() && std::isalpha(static_cast<unsigned char>(text[i])) == 0) ++i;
      continue;
    }
    out += text[i];
  }
  return out;
}

bool is_device(const std::string& name) {
  const std::size_t digits = name.find_first_of("0123456789");
  return (name.starts_with("GPU") || name.starts_with("NIC") || name.starts_with("mlx")) && digits != std::string::npos;
}

std::uint64_t number(const std::string& text) {
  std::uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

}  // namespace

std::string output_of(const std::vector<std::string>& command, std::chrono::milliseconds limit) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw Error(fmt::format("no pipe for '{}': {}", command[0], std::strerror(errno)));
  std::vector<char*> words;
  for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  const pid_t parent = ::getpid(), child = ::fork();
  const int refusal = errno;
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int nothing = ::open("/dev/null", O_RDWR);
    ::dup2(nothing, STDIN_FILENO);
    ::dup2(ends[1], STDOUT_FILENO);
    ::dup2(nothing, STDERR_FILENO);
    if (::getppid() == parent) ::execvp(words[0], words.data());
    ::_exit(127);
  }
  ::close(ends[1]);
  std::string output;
  bool late = child < 0;
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!late) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    pollfd ready{ends[0], POLLIN, 0};
    const int found = ::poll(&ready, 1, static_cast<int>(std::max<std::int64_t>(0, left.count())));
    if (found < 0 && errno == EINTR) continue;
    late = found <= 0;
    char buffer[4096];
    const ssize_t bytes = late ? 0 : ::read(ends[0], buffer, sizeof buffer);
    if (bytes <= 0) break;
    output.append(buffer, static_cast<std::size_t>(bytes));
  }
  ::close(ends[0]);
  if (child < 0) throw_not_started(command[0], refusal);
  if (late) ::kill(child, SIGKILL);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (late) throw Error(fmt::format("{} did not answer within {} s", command[0], limit.count() / 1000.0));
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127) throw Error(fmt::format("{} is not installed", command[0]));
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) throw Error(fmt::format("{} failed", command[0]));
  return output;
}

std::vector<Gpu> parse_gpu_list(const std::string& csv) {
  std::vector<Gpu> gpus;
  for (const std::string& line : split(csv, '\n')) {
    const auto fields = split(line, ',');
    if (fields.size() < 4) continue;
    Gpu gpu{.index = static_cast<int>(number(trimmed(fields[0]))),
            .name = trimmed(fields[1]),
            .bus_id = trimmed(fields[2]),
            .bytes = number(trimmed(fields[3])) << 20};
    if (fields.size() >= 6) gpu.pcie = fmt::format("gen {} x{}", trimmed(fields[4]), trimmed(fields[5]));
    gpus.push_back(std::move(gpu));
  }
  return gpus;
}

LinkMatrix parse_link_matrix(const std::string& text) {
  LinkMatrix matrix;
  std::size_t devices = 0;
  for (const std::string& line : split(plain(text), '\n')) {
    const auto cells = split(line, '\t');
    if (cells.empty()) continue;
    const std::string first = trimmed(cells[0]);
    if (devices == 0 && first.empty()) {  // the heading: device names, then affinities
      for (std::size_t i = 1; i < cells.size() && is_device(trimmed(cells[i])); ++i) ++devices;
      for (std::size_t i = 1; i <= devices; ++i) matrix.names.push_back(trimmed(cells[i]));
      continue;
    }
    if (first.starts_with("NIC") && first.find(": ") != std::string::npos) {
      matrix.nics.push_back(first);
      continue;
    }
    if (matrix.cells.size() >= devices || cells.size() <= devices || !is_device(first)) continue;
    std::vector<std::string> row;
    std::string remark;
    for (std::size_t i = 1; i < cells.size(); ++i) {
      const std::string cell = trimmed(cells[i]);
      if (i <= devices) {
        row.push_back(cell);
      } else if (!cell.empty() && cell != "N/A") {
        remark += (remark.empty() ? (i == devices + 1 ? "CPUs " : "") : ", NUMA node ") + cell;
      }
    }
    matrix.cells.push_back(std::move(row));
    matrix.remarks.push_back(std::move(remark));
  }
  if (matrix.cells.size() != devices) return {};
  return matrix;
}

GpuLinks read_gpu_links(const std::string& program, std::chrono::milliseconds limit) {
  GpuLinks links;
  try {
    links.gpus = parse_gpu_list(output_of(
        {program, "--query-gpu=index,name,pci.bus_id,memory.total,pcie.link.gen.current,pcie.link.width.current",
         "--format=csv,noheader,nounits"},
        limit));
    links.matrix = parse_link_matrix(output_of({program, "topo", "-m"}, limit));
    if (links.matrix.names.empty()) links.problem = program + " topo -m gave no table";
  } catch (const Error& error) {
    links.problem = error.what();
  }
  if (links.gpus.empty() && std::filesystem::exists("/proc/driver/nvidia/version"))
    links.problem += "; the NVIDIA driver is there, so there may be GPUs: put nvidia-smi into PATH";
  return links;
}

std::string describe(const GpuLinks& links) {
  std::string text = "GPUs\n";
  for (const Gpu& gpu : links.gpus) {
    text += fmt::format("  GPU{:<3} {}, {}, {}{}\n", gpu.index, gpu.name, human_bytes(gpu.bytes), gpu.bus_id,
                        gpu.pcie.empty() ? "" : ", PCIe " + gpu.pcie);
  }
  if (links.gpus.empty()) text += "  none found";
  if (!links.problem.empty()) text += fmt::format("{}{}", links.gpus.empty() ? ": " : "  ", links.problem);
  if (links.gpus.empty() || !links.problem.empty()) text += "\n";
  const LinkMatrix& matrix = links.matrix;
  if (matrix.names.empty()) return text;
  text += "Links\n        ";
  for (const std::string& name : matrix.names) text += fmt::format(" {:>6}", name);
  text += "\n";
  for (std::size_t row = 0; row < matrix.names.size(); ++row) {
    text += fmt::format("  {:<6}", matrix.names[row]);
    for (const std::string& cell : matrix.cells[row]) text += fmt::format(" {:>6}", cell);
    text += matrix.remarks[row].empty() ? "\n" : fmt::format("   {}\n", matrix.remarks[row]);
  }
  for (const std::string& nic : matrix.nics) text += fmt::format("  {}\n", nic);
  return text +
         "  X itself, NV<n> n NVLinks, PIX one PCIe bridge, PXB several, PHB the host bridge, NODE the same NUMA "
         "node,\n"
         "  SYS across NUMA nodes\n";
}

}  // namespace phalanx::measure
