// NetnsNodes: simulated nodes (tests only). Each is a network namespace; a bridge in one more namespace joins them. So
// sockets between nodes cross a network, and a test can take a link down. This needs root. good() says whether the
// namespaces could be made; if not, failure_reason() says why.
//
//   const NetnsNodes nodes(2);
//   SKIP_WITHOUT(nodes);
//   RunningLauncher launcher(1, arguments, {.before = nodes.on(1)});  // its sockets belong to node 1
//   nodes.cut(1);
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "phalanx/base/temp_directory.h"
#include "phalanx/launch/testing/launcher_process.h"

namespace phalanx {

class NetnsNodes {
 public:
  explicit NetnsNodes(int count) : name_(fmt::format("phx{}", getpid())), count_(count) {
    good_ = run("ip netns add " + hub()) && run(fmt::format("ip -n {} link add br0 type bridge", hub())) &&
            run(fmt::format("ip -n {} link set br0 up", hub()));
    for (int i = 0; good_ && i < count; ++i)
      good_ = run("ip netns add " + machine(i)) &&
              run(fmt::format("ip link add v{} netns {} type veth peer name eth0 netns {}", i, hub(), machine(i))) &&
              run(fmt::format("ip -n {} link set v{} master br0 up", hub(), i)) &&
              run(fmt::format("ip -n {} addr add {}/24 dev eth0", machine(i), address(i))) &&
              run(fmt::format("ip -n {} link set eth0 up", machine(i))) &&
              run(fmt::format("ip -n {} link set lo up", machine(i)));
  }
  ~NetnsNodes() {
    for (int i = 0; i < count_; ++i) run("ip netns del " + machine(i));
    run("ip netns del " + hub());
  }
  bool good() const { return good_; }
  const std::string& failure_reason() const { return failure_reason_; }
  std::string address(int i) const { return fmt::format("10.213.7.{}", i + 1); }
  /// The prefix of a command that runs on node i.
  std::vector<std::string> on(int i) const { return {"ip", "netns", "exec", machine(i)}; }
  /// Takes the link to node i down.
  void cut(int i) const { EXPECT_TRUE(run(fmt::format("ip -n {} link set v{} down", hub(), i))); }
  /// The text of /proc/net/tcp on node i.
  std::string listeners(int i) const {
    TempDirectory folder("listeners");
    const std::string path = (folder.path() / "tcp").string();
    run(fmt::format("ip netns exec {} cat /proc/net/tcp > {}", machine(i), path));
    write_note(folder, "x");
    return note_of(folder, "tcp");
  }

 private:
  std::string hub() const { return name_ + "h"; }
  std::string machine(int i) const { return fmt::format("{}m{}", name_, i); }
  // Stores the output of the first command that fails.
  bool run(const std::string& command) const {
    std::string said;
    FILE* const output = popen((command + " 2>&1").c_str(), "r");
    if (output == nullptr) return false;
    for (int c = 0; (c = std::fgetc(output)) != EOF;) said.push_back(static_cast<char>(c));
    if (pclose(output) == 0) return true;
    if (failure_reason_.empty()) failure_reason_ = fmt::format("`{}`: {}", command, said.substr(0, said.find('\n')));
    return false;
  }
  std::string name_;
  mutable std::string failure_reason_;
  int count_;
  bool good_ = false;
};

#define SKIP_WITHOUT(machines)                                                                         \
  if (!(machines).good())                                                                              \
  GTEST_SKIP() << "network namespaces cannot be made here (as root, with ip netns, bridge and veth): " \
               << (machines).failure_reason()

}  // namespace phalanx
