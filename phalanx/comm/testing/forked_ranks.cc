#include "phalanx/comm/testing/forked_ranks.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <exception>
#include <vector>

namespace phalanx {

std::string run_forked_ranks(int world, const std::function<void(int rank)>& body, int killed_rank) {
  constexpr std::size_t kText = 4096;
  auto* texts = static_cast<char*>(mmap(nullptr, kText * static_cast<std::size_t>(world), PROT_READ | PROT_WRITE,
                                        MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::vector<pid_t> children;
  for (int rank = 0; rank < world; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      at::set_num_threads(1);
      int status = 0;
      try {
        body(rank);
      } catch (const std::exception& e) {
        std::strncpy(texts + static_cast<std::size_t>(rank) * kText, e.what(), kText - 1);
        status = 1;
      }
      _exit(status);
    }
    children.push_back(child);
  }
  std::string failures;
  for (int rank = 0; rank < world; ++rank) {
    int status = 0;
    waitpid(children[static_cast<std::size_t>(rank)], &status, 0);
    const bool was_killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (rank == killed_rank ? was_killed : WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    failures += WIFSIGNALED(status) ? fmt::format("rank {}: signal {}\n", rank, WTERMSIG(status))
                                    : fmt::format("rank {}: exit {}: {}\n", rank, WEXITSTATUS(status),
                                                  texts + static_cast<std::size_t>(rank) * kText);
  }
  munmap(texts, kText * static_cast<std::size_t>(world));
  return failures;
}

}  // namespace phalanx
