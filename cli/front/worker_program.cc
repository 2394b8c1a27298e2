#include "cli/front/worker_program.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <vector>

#include "phalanx/base/cpu.h"
#include "phalanx/base/error.h"
#include "phalanx/launch/rendezvous/worker_environment.h"
#include "phalanx/launch/supervisor/environment_preparation.h"
#include "phalanx/launch/supervisor/worker_report.h"

namespace phalanx::cli {

std::string worker_program() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::filesystem::path here = self.parent_path();
  const std::filesystem::path places[] = {here / "phalanx-worker",
                                          here.parent_path() / "libexec" / "phalanx" / "phalanx-worker"};
  for (const auto& place : places) {
    if (::access(place.c_str(), X_OK) == 0) return place.string();
  }
  throw Error(fmt::format("phalanx-worker is missing: looked for '{}' and '{}'; build or install Phalanx again",
                          places[0].string(), places[1].string()));
}

void become_worker(const std::string& command, const Arguments& arguments) {
  const std::string program = worker_program();
  threads_from_environment();
  EnvironmentMap environment = current_environment();
  const WorkerEnvironment ranks = read_worker_environment();
  prepare_environment(environment, ranks.local_world_size > 0 ? ranks.local_world_size : ranks.world_size);

  std::vector<std::string> variables;
  for (const auto& [name, value] : environment) variables.push_back(fmt::format("{}={}", name, value));
  std::vector<char*> envp, argv;
  for (std::string& variable : variables) envp.push_back(variable.data());
  envp.push_back(nullptr);
  std::vector<std::string> words = {program, command};
  words.insert(words.end(), arguments.begin(), arguments.end());
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  announce_graceful_stop(std::chrono::seconds(3));  // until the worker announces another time
  ::execve(program.c_str(), argv.data(), envp.data());
  throw Error(fmt::format("cannot start '{}': {}", program, std::strerror(errno)));
}

}  // namespace phalanx::cli
