// Output of ranks that nobody reads: the ranks block, and the launcher still monitors them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "phalanx/base/testing/comes_true.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/launch/testing/launcher_process.h"

namespace phalanx {
namespace {

// The standard error of a launcher. It is read only when read() is called.
class SlowReader {
 public:
  SlowReader() { EXPECT_EQ(pipe2(ends_, O_CLOEXEC), 0); }
  ~SlowReader() {
    close_write_end();
    close(ends_[0]);
  }
  int write_end() const { return ends_[1]; }
  void close_write_end() {
    if (ends_[1] >= 0) close(ends_[1]);
    ends_[1] = -1;
  }
  bool is_full() const {
    pollfd writable{ends_[1], POLLOUT, 0};
    return poll(&writable, 1, 0) == 0;
  }
  /// Reads to the end of the stream, or until that many bytes are there.
  void read(std::size_t bytes = std::string::npos) {
    char chunk[4096];
    for (ssize_t got; text_.size() < bytes && (got = ::read(ends_[0], chunk, sizeof chunk)) > 0;)
      text_.append(chunk, static_cast<std::size_t>(got));
  }
  const std::string& text() const { return text_; }

 private:
  int ends_[2] = {-1, -1};
  std::string text_;
};

class UnreadOutput : public testing::Test {
 protected:
  // Each rank notes its process, then runs the script. Rank 0, which would write to the console directly, prints
  // nothing.
  std::unique_ptr<RunningLauncher> start(int ranks, const std::string& script) {
    std::vector<std::string> words;
    for (const std::string& word :
         {std::string("sh"), std::string("-c"),
          "echo $$ > $0/part.$RANK; mv $0/part.$RANK $0/pid.$RANK; [ $RANK = 0 ] || " + script, notes_.path().string()})
      words.push_back(word);
    return std::make_unique<RunningLauncher>(ranks, words, RunningLauncher::Options{.stderr_fd = reader_.write_end()});
  }
  // True if all buffers between the rank and the reader are full, so that the rank blocks.
  bool stands_still(pid_t rank) const {
    if (!reader_.is_full()) return false;
    std::string before;
    for (int same = 0; same < 50; usleep(2000)) {
      std::ifstream file("/proc/" + std::to_string(rank) + "/io");
      const std::string now{std::istreambuf_iterator<char>(file), {}};
      same = now == before ? same + 1 : 0;
      before = now;
    }
    return true;
  }
  static std::size_t resident_pages(pid_t process) {
    std::ifstream file("/proc/" + std::to_string(process) + "/statm");
    std::size_t size = 0, resident = 0;
    file >> size >> resident;
    return resident;
  }

  TempDirectory notes_{"notes"};
  SlowReader reader_;
};

TEST_F(UnreadOutput, HoldsUpTheRankThatWritesAndNoSignal) {
  auto launcher = start(2, "exec yes >&2");
  ASSERT_TRUE(comes_true([&] { return stands_still(noted_pid(notes_, "pid.1")); }));
  EXPECT_LT(resident_pages(launcher->pid()) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)), 64U << 20);
  launcher->send(SIGTERM);
  ASSERT_TRUE(comes_true([&] { return is_gone(launcher->pid()); }));
  EXPECT_EQ(launcher->wait(), 128 + SIGTERM);
}

TEST_F(UnreadOutput, HidesNoFailureOfAnotherRank) {
  auto launcher = start(3, "{ [ $RANK = 1 ] && exec yes >&2; while [ ! -e $0/fail ]; do sleep 0.01; done; exit 7; }");
  const pid_t writer = noted_pid(notes_, "pid.1");
  ASSERT_TRUE(comes_true([&] { return stands_still(writer); }));
  write_note(notes_, "fail");
  ASSERT_TRUE(comes_true([&] { return is_gone(writer); }));
  reader_.close_write_end();
  reader_.read();
  EXPECT_EQ(launcher->wait(), 1);
  EXPECT_THAT(reader_.text(), HasSubstr("[1] y\n[1] y\n"));
  EXPECT_THAT(reader_.text(), ContainsRegex("\n(launcher: )?rank 2 [(]host [^)]*[)] ended with exit status 7\n$"));
}

class LongOutput : public UnreadOutput {
 protected:
  // More than is buffered for a slow reader. When the ranks end, the last part is not read yet. The launcher waits as
  // long as there is a reader.
  static constexpr int kLines = 200'000;
  std::unique_ptr<RunningLauncher> start_and_wait_for_rank_1() {
    auto launcher = start(2, "exec seq 1 " + std::to_string(kLines) + " >&2");
    reader_.read(1'200'000);
    const pid_t rank = noted_pid(notes_, "pid.1");
    EXPECT_TRUE(comes_true([&] { return is_gone(rank); }));
    for (int look = 0; look < 200 && !is_gone(launcher->pid()); ++look) usleep(2000);
    EXPECT_FALSE(is_gone(launcher->pid()));
    return launcher;
  }
};

TEST_F(LongOutput, IsShownToTheEnd) {
  auto launcher = start_and_wait_for_rank_1();
  reader_.close_write_end();
  reader_.read();
  EXPECT_EQ(launcher->wait(), 0);
  std::string expected;
  for (int line = 1; line <= kLines; ++line) expected += "[1] " + std::to_string(line) + "\n";
  EXPECT_TRUE(reader_.text() == expected) << reader_.text().size() << " bytes of " << expected.size();
}

TEST_F(LongOutput, OfRanksThatHaveEndedIsGivenUpWhenTheUserStopsWaiting) {
  auto launcher = start_and_wait_for_rank_1();
  launcher->send(SIGINT);
  ASSERT_TRUE(comes_true([&] { return is_gone(launcher->pid()); }));
  EXPECT_EQ(launcher->wait(), 128 + SIGINT);
}

}  // namespace
}  // namespace phalanx
