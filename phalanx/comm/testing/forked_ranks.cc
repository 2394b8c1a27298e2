#include "phalanx/comm/testing/forked_ranks.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <thread>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/comm/testing/fork_gate.h"

namespace phalanx {
namespace {

#ifdef __SANITIZE_THREAD__
std::string run_threads(int world, const std::function<void(int rank)>& body) {
  std::vector<std::string> failures(static_cast<std::size_t>(world));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world; ++rank)
    ranks.emplace_back([&, rank] {
      at::set_num_threads(1);
      try {
        body(rank);
      } catch (const std::exception& e) {
        failures[static_cast<std::size_t>(rank)] = fmt::format("rank {}: {}\n", rank, e.what());
      }
    });
  for (std::thread& rank : ranks) rank.join();
  std::string all;
  for (const std::string& failure : failures) all += failure;
  return all;
}
#endif

}  // namespace

void begin_forked_child() {
#ifdef __SANITIZE_THREAD__
  // The parent's other threads are gone, but ThreadSanitizer counts them as alive, and ends the process when a thread
  // gets the stack of one of them. Larger stacks are new ones.
  pthread_attr_t attributes;
  std::size_t bytes = 0;
  pthread_getattr_default_np(&attributes);
  pthread_attr_getstacksize(&attributes, &bytes);
  pthread_attr_setstacksize(&attributes, 2 * bytes);
  pthread_setattr_default_np(&attributes);
  pthread_attr_destroy(&attributes);
#endif
  at::set_num_threads(1);
}

void destroy_in_child(std::shared_ptr<Communicator>& comm) {
  if (comm.use_count() != 1) throw std::runtime_error("the communicator has other owners");
  const pid_t child = fork();
  if (child == 0) {
    begin_forked_child();
    alarm(20);
    std::string refusal;
    try {
      comm->barrier();
    } catch (const Error& error) {
      refusal = error.what();
    }
    comm.reset();
    _exit(refusal.find("belongs to the process that forked this one") == std::string::npos ? 1 : 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) throw std::runtime_error(fmt::format("the child ended by signal {}", WTERMSIG(status)));
  if (WEXITSTATUS(status) != 0) throw std::runtime_error("the child's barrier was not refused");
}

std::string run_forked_ranks_or_threads(int world, const std::function<void(int rank)>& body, int killed_rank) {
#ifdef __SANITIZE_THREAD__
  if (killed_rank < 0) return run_threads(world, body);
#endif
  return run_forked_ranks(world, body, killed_rank);
}

std::string run_forked_ranks(int world, const std::function<void(int rank)>& body, int killed_rank) {
  constexpr std::size_t kText = 4096;
  auto* texts = static_cast<char*>(mmap(nullptr, kText * static_cast<std::size_t>(world), PROT_READ | PROT_WRITE,
                                        MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::vector<pid_t> children;
  ForkGate gate;
  for (int rank = 0; rank < world; ++rank) {
    const pid_t child = gate.fork();
    if (child == 0) {
      begin_forked_child();
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
  gate.open();
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
