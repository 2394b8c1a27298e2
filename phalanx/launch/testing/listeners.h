// The listening sockets of a process, from /proc (tests only).
#pragma once

#include <fmt/format.h>
#include <sys/types.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace phalanx {

/// The local addresses of the process's listening TCP sockets, one per socket. They are written in hexadecimal as in
/// /proc/net/tcp and tcp6; an IPv4 address has its first byte last ("0100007F").
inline std::vector<std::string> listening_addresses(pid_t pid) {
  std::set<std::string> sockets;  // inodes of the process's sockets
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(fmt::format("/proc/{}/fd", pid), error)) {
    const std::string target = std::filesystem::read_symlink(entry.path(), error).string();
    if (target.starts_with("socket:[")) sockets.insert(target.substr(8, target.size() - 9));
  }
  std::vector<std::string> addresses;
  for (const char* table : {"tcp", "tcp6"}) {
    std::ifstream file(fmt::format("/proc/{}/net/{}", pid, table));
    std::string line;
    while (std::getline(file, line)) {
      std::istringstream words(line);
      std::string slot, local, remote, state, queues, timer, retransmissions, user, timeout, inode;
      words >> slot >> local >> remote >> state >> queues >> timer >> retransmissions >> user >> timeout >> inode;
      if (state == "0A" && sockets.contains(inode)) addresses.push_back(local.substr(0, local.find(':')));
    }
  }
  return addresses;
}

}  // namespace phalanx
