#include "phalanx/base/start_thread.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>

#include "phalanx/base/error.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/base/testing/under_sanitizer.h"

namespace phalanx {
namespace {

// Returns the message of a child that has as few rights as a user's job, and these limits.
template <class Body>
std::string message_under(int resource, rlim_t most, Body body) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    std::string text = "no error";
    try {
      const rlimit limit{most, most};
      setrlimit(static_cast<__rlimit_resource>(resource), &limit);
      if (getuid() == 0 && setuid(65534) != 0) throw Error("setuid");  // RLIMIT_NPROC does not apply to root
      body();
    } catch (const Error& error) {
      text = error.what();
    } catch (const std::exception& error) {
      text = std::string("not in words: ") + error.what();
    }
    [[maybe_unused]] const auto written = write(ends[1], text.data(), text.size());
    _exit(0);
  }
  close(ends[1]);
  std::string text(4096, '\0');
  std::size_t size = 0;
  for (ssize_t got; (got = read(ends[0], text.data() + size, text.size() - size)) > 0;)
    size += static_cast<std::size_t>(got);
  close(ends[0]);
  waitpid(child, nullptr, 0);
  return text.substr(0, size);
}

TEST(StartThreadTest, RunsAndIsJoined) {
  std::atomic<int> value{0};
  start_thread("a test", [&] { value = 7; }).join();
  EXPECT_EQ(value, 7);
  check_threads(3);
  check_stack();
}

TEST(StartThreadTest, ARefusalNamesTheLimitItsValueAndTheCure) {
  const std::string one = message_under(RLIMIT_NPROC, 1, [] { start_thread("a test", [] {}).join(); });
  EXPECT_THAT(one,
              AllOf(HasSubstr("(a test)"), HasSubstr("RLIMIT_NPROC is 1 threads of this user (ulimit -u), of which"),
                    HasSubstr("or start fewer ranks or threads (OMP_NUM_THREADS)")));
  EXPECT_THAT(message_under(RLIMIT_NPROC, 1, [] { check_threads(5); }), HasSubstr("0 of the 5 that are needed"));
  EXPECT_THAT(message_under(RLIMIT_NPROC, 1,
                            [] {
                              if (fork() < 0) throw_not_started("a rank", errno);
                            }),
              HasSubstr("(a rank)"));
}

// The stack of a thread is memory of the process.
TEST(StartThreadTest, ARefusalForWantOfMemoryNamesItsLimitFirst) {
  if (kUnderSanitizer) GTEST_SKIP() << kWhyNoMemoryLimit;
  const std::string refused = message_under(RLIMIT_DATA, 64 << 20, [] { check_threads(64); });
  EXPECT_THAT(refused, HasSubstr("Resource temporarily unavailable). RLIMIT_DATA: 64.0 MiB, of which "));
  EXPECT_THAT(refused, HasSubstr("for its stack (ulimit -s)"));
  EXPECT_THAT(refused, HasSubstr("Raise the limit that is used up (ulimit -v, ulimit -d, ulimit -u, "));
}

TEST(StartThreadTest, ATinyStackIsSaid) {
  EXPECT_THAT(message_under(RLIMIT_STACK, 256 << 10, [] { check_stack(); }),
              AllOf(HasSubstr("limited to 256 KiB (RLIMIT_STACK, ulimit -s)"), HasSubstr("ulimit -s 8192")));
}

TEST(StartThreadTest, GroupsAreReadInBothVersions) {
  for (const bool is_v1 : {false, true}) {
    const TempDirectory root("limits");
    const auto group = root.path() / (is_v1 ? "sys/fs/cgroup/pids/job/step" : "sys/fs/cgroup/job/step");
    std::filesystem::create_directories(root.path() / "proc/self");
    std::filesystem::create_directories(group);
    std::ofstream(root.path() / "proc/self/cgroup")
        << (is_v1 ? "3:memory:/other\n7:pids:/job/step\n" : "0::/job/step\n");
    std::ofstream(group / "pids.max") << "max\n";
    std::ofstream(group.parent_path() / "pids.max") << "64\n";
    std::ofstream(group.parent_path() / "pids.current") << "61\n";
    EXPECT_THAT(thread_limits_text(root.path()),
                AllOf(HasSubstr("pids.max is 64 ("), HasSubstr("job/pids.max), of which 61 are in use")));
  }
}

}  // namespace
}  // namespace phalanx
