#include "phalanx/launch/rendezvous/init_method.h"

#include <fmt/format.h>

#include <charconv>
#include <filesystem>
#include <utility>

#include "phalanx/base/env.h"
#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"

namespace phalanx {
namespace {

using Rendezvous = WorkerEnvironment::Rendezvous;

struct ParsedMethod {
  std::string scheme, place;
  int rank = -1, world_size = -1;
};

[[noreturn]] void fail_method(const std::string& method, const std::string& what) {
  throw ConfigError(fmt::format("init method '{}': {}", method, what));
}

ParsedMethod parse_method(const std::string& method) {
  ParsedMethod result;
  const auto colon = method.find("://");
  if (colon != std::string::npos) result.scheme = method.substr(0, colon);
  if (result.scheme != "env" && result.scheme != "tcp" && result.scheme != "file")
    fail_method(method, "expected env://, tcp://HOST:PORT or file:///PATH");
  const auto question = method.find('?', colon);
  result.place = method.substr(colon + 3, question == std::string::npos ? question : question - colon - 3);
  std::string query = question == std::string::npos ? "" : method.substr(question + 1);
  while (!query.empty()) {
    const auto end = std::min(query.find('&'), query.size());
    const std::string item = query.substr(0, end);
    query.erase(0, end + 1);
    const auto equals = std::min(item.find('='), item.size());
    const std::string name = item.substr(0, equals), value = item.substr(std::min(equals + 1, item.size()));
    if (name != "rank" && name != "world_size")
      fail_method(method, fmt::format("'{}'{} is not known: expected rank and world_size", name,
                                      did_you_mean(name, {"rank", "world_size"})));
    int number = 0;
    const auto parsed = std::from_chars(value.data(), value.data() + value.size(), number);
    if (value.empty() || parsed.ec != std::errc{} || parsed.ptr != value.data() + value.size() || number < 0)
      fail_method(method, fmt::format("{} is '{}': expected a number from 0", name, value));
    (name == "rank" ? result.rank : result.world_size) = number;
  }
  return result;
}

int agreed_number(const std::string& method, const char* name, int in_method, int by_caller) {
  if (in_method >= 0 && by_caller >= 0 && in_method != by_caller)
    fail_method(method, fmt::format("its {} is {}, and the program gives {}", name, in_method, by_caller));
  return in_method >= 0 ? in_method : by_caller;
}

}  // namespace

WorkerEnvironment resolve_init_method(const std::string& method, int rank, int world_size,
                                      const EnvironmentLookup& lookup_or_none) {
  const EnvironmentLookup lookup =
      lookup_or_none ? lookup_or_none : [](const std::string& name) { return env_string(name); };
  const ParsedMethod parsed = parse_method(method);
  if (parsed.scheme == "env") {
    if (!parsed.place.empty() || parsed.rank >= 0 || parsed.world_size >= 0 || rank >= 0 || world_size >= 0)
      fail_method(method, "with env:// everything comes from the environment: leave rank and world size out");
    return read_worker_environment(lookup);
  }

  HostPort master{"localhost", 1};
  if (parsed.scheme == "tcp") {
    master = parse_host_port(parsed.place, fmt::format("the address in the init method '{}'", method));
    if (master.port == 0) fail_method(method, "port 0 would be a different one every time: choose one that is free");
  } else if (!std::filesystem::path(parsed.place).is_absolute() || parsed.place.back() == '/') {
    fail_method(method, "expected the whole path of a file, as in file:///shared/run7");
  }

  const int given_rank = agreed_number(method, "rank", parsed.rank, rank);
  const int given_world = agreed_number(method, "world size", parsed.world_size, world_size);
  WorkerEnvironment result;
  if (given_rank >= 0 && given_world >= 0) {
    result.rank = given_rank;
    result.world_size = given_world;
  } else {
    // The method replaces the MASTER_* variables, so it is no error if these are missing.
    result = read_worker_environment([&](const std::string& name) -> std::optional<std::string> {
      if (name == "MASTER_ADDR") return master.host;
      if (name == "MASTER_PORT") return std::to_string(master.port);
      return lookup(name);
    });
    const bool told = !result.launcher.empty();
    if (!told)
      fail_method(method, fmt::format("the {} not given: add ?rank=R&world_size=W, set RANK and WORLD_SIZE, or start "
                                      "the ranks with srun, mpirun or a launcher",
                                      given_rank >= 0    ? "world size is"
                                      : given_world >= 0 ? "rank is"
                                                         : "rank and the world size are"));
    if ((given_rank >= 0 && given_rank != result.rank) || (given_world >= 0 && given_world != result.world_size))
      fail_method(method, fmt::format("it says {} {}, and {} rank {} of {}", given_rank >= 0 ? "rank" : "world size",
                                      given_rank >= 0 ? given_rank : given_world, result.launcher, result.rank,
                                      result.world_size));
  }
  if (result.world_size < 1 || result.rank >= result.world_size)
    fail_method(method, fmt::format("rank {} and world size {}: expected a rank from 0 to the world size less one",
                                    result.rank, result.world_size));
  result.launcher += fmt::format("{}{}", result.launcher.empty() ? "" : ", ", method.substr(0, method.find('?')));
  result.rendezvous = Rendezvous::none;
  if (result.world_size > 1)
    result.rendezvous = parsed.scheme == "tcp" ? Rendezvous::static_master : Rendezvous::shared_file;
  result.master = master;
  result.file_folder = std::filesystem::path(parsed.place).parent_path().string();
  result.file_name = std::filesystem::path(parsed.place).filename().string();
  return result;
}

}  // namespace phalanx
