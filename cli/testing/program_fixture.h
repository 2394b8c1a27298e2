// ProgramTest: runs the real `phalanx`, which is beside the test program, like a user: on a terminal, under limits, or
// with signals during the run.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "phalanx/base/temp_directory.h"
#include "phalanx/base/testing/folder_test.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/base/testing/under_sanitizer.h"

namespace phalanx::cli::program_testing {

inline std::string program() {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "phalanx").string();
}

inline std::string contents(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

inline int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

/// The processes with this word on their command line.
inline std::vector<pid_t> processes_with(const std::string& word) {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    if (contents(entry.path() / "cmdline").find(word) != std::string::npos) found.push_back(std::stoi(name));
  }
  return found;
}

/// The ranks that train with this configuration file.
inline std::vector<pid_t> workers_of(const std::string& config) {
  std::vector<pid_t> workers;
  for (const pid_t process : processes_with(config)) {
    if (contents("/proc/" + std::to_string(process) + "/cmdline").find("phalanx-worker") != std::string::npos) {
      workers.push_back(process);
    }
  }
  return workers;
}

struct Outcome {
  int status = -1;  // the exit status; 128 + signal if a signal ended it
  std::string out;
  std::string err;
};

struct RunOptions {
  std::map<std::string, std::string> environment;
  rlim_t file_size_limit = RLIM_INFINITY;
  std::map<int, rlim_t> limits;  // others: RLIMIT_NOFILE, RLIMIT_STACK and their like
  bool ignore_hang_up = false;   // SIGHUP, as nohup does
  enum class Streams { files, terminal, unread } streams = Streams::files;
  /// With a terminal: called repeatedly. When it returns true the terminal is closed, as by closing its window.
  std::function<bool()> hang_up;
  /// Called repeatedly with the process id until it returns true or the process has ended.
  std::function<bool(pid_t)> meanwhile;
};

/// Runs `VARIABLES phalanx ARGUMENTS` by a shell, so that quotes group words. It reads nothing; its output is also in
/// the files out and err of the folder.
inline Outcome run_line(const std::filesystem::path& folder, const std::string& arguments,
                        const std::string& variables = "") {
  const std::filesystem::path out = folder / "out", err = folder / "err";
  const std::string line =
      variables + " " + program() + " " + arguments + " > " + out.string() + " 2> " + err.string() + " < /dev/null";
  const int status = std::system(line.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), contents(out), contents(err)};
}

/// Writes 4,000 ids below 512, as raw uint16, that a small model learns in a few steps.
inline void write_periodic_tokens(const std::filesystem::path& path) {
  std::ofstream tokens(path, std::ios::binary);
  for (int i = 0; i < 4000; ++i) {
    const auto id = static_cast<std::uint16_t>((i * 7 + i / 50) % 512);
    tokens.write(reinterpret_cast<const char*>(&id), sizeof id);
  }
}

/// The text of a run's TOML that trains the debug flavor on such ids.
inline std::string debug_run(const std::filesystem::path& tokens) {
  return "[model]\nflavor = \"debug\"\n[training]\ndataset_path = \"" + tokens.string() +
         "\"\nseq_len = 32\nlocal_batch_size = 2\n[optimizer]\nlr = 1e-2\n[lr_scheduler]\nwarmup_steps = 1\n";
}

/// Tests that share a folder, which SetUpTestSuite() makes and fills: class MyTest : public FolderSuite<MyTest>.
template <class Suite>
class FolderSuite : public ::testing::Test {
 protected:
  static void TearDownTestSuite() { folder_.reset(); }
  static void make_folder(const std::string& name) { folder_ = std::make_unique<TempDirectory>(name); }
  static std::string file(const std::string& name) { return (folder_->path() / name).string(); }

  /// Returns the exit status of `phalanx ARGUMENTS`. Its output is in out_ and error_.
  static int call(const std::string& arguments) {
    const Outcome outcome = run_line(folder_->path(), arguments);
    out_ = outcome.out;
    error_ = outcome.err;
    return outcome.status;
  }

  static inline std::unique_ptr<TempDirectory> folder_;
  static inline std::string out_, error_;
};

/// A terminal of 100 columns for the program under test only. Its output is collected.
class Terminal {
 public:
  ~Terminal() { close(); }
  void open() {
    master_ = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    ASSERT_TRUE(master_ >= 0 && ::grantpt(master_) == 0 && ::unlockpt(master_) == 0);
    const winsize size{.ws_row = 30, .ws_col = 100, .ws_xpixel = 0, .ws_ypixel = 0};
    ::ioctl(master_, TIOCSWINSZ, &size);
    slave_ = ::ptsname(master_);
  }
  /// Called in the child: becomes the leader of a session with this terminal.
  void take() const {
    ::setsid();
    const int slave = ::open(slave_.c_str(), O_RDWR);
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::dup2(slave, fd);
    ::close(slave);
  }
  void read() {
    char chunk[4096];
    for (ssize_t got; master_ >= 0 && (got = ::read(master_, chunk, sizeof chunk)) > 0;) {
      text_.append(chunk, static_cast<std::size_t>(got));
    }
  }
  void close() {
    if (master_ >= 0) ::close(master_);
    master_ = -1;
  }
  const std::string& text() const { return text_; }

 private:
  int master_ = -1;
  std::string slave_, text_;
};

class ProgramTest : public FolderTest {
 protected:
  Outcome run(const std::vector<std::string>& arguments, const RunOptions& options = {}) const {
    using Streams = RunOptions::Streams;
    const std::string out = path("stdout.txt"), err = path("stderr.txt");
    Terminal terminal;
    if (options.streams == Streams::terminal) terminal.open();
    for (const std::string& file : {out, err}) std::ofstream(file, std::ios::trunc);  // of the run before this one
    const pid_t child = ::fork();
    if (child == 0) {
      // A separate process group, so that the processes that it starts can be ended with it.
      if (options.streams == Streams::terminal) {
        terminal.take();
      } else {
        ::setpgid(0, 0);
        ::dup2(::open(out.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), STDOUT_FILENO);
        ::dup2(::open(err.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), STDERR_FILENO);
      }
      if (int ends[2]; options.streams == Streams::unread && ::pipe(ends) == 0) {
        ::close(ends[0]);
        ::dup2(ends[1], STDOUT_FILENO);
        ::dup2(ends[1], STDERR_FILENO);
      }
      for (const char* name :
           {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PHALANX_STORE"}) {
        ::unsetenv(name);
      }
      ::setenv("TMPDIR", folder().c_str(), 1);  // ranks that fail on purpose must leave no files elsewhere
      for (const auto& [name, value] : options.environment) ::setenv(name.c_str(), value.c_str(), 1);
      ::signal(SIGHUP, options.ignore_hang_up ? SIG_IGN : SIG_DFL);  // independent of how the tests were started
      if (options.file_size_limit != RLIM_INFINITY) {
        ::signal(SIGXFSZ, SIG_IGN);  // a write past the limit then fails, as on a full disk
        const rlimit limit{options.file_size_limit, options.file_size_limit};
        ::setrlimit(RLIMIT_FSIZE, &limit);
      }
      for (const auto& [resource, most] : options.limits) {
        const rlimit limit{most, most};
        ::setrlimit(static_cast<__rlimit_resource>(resource), &limit);
      }
      std::vector<std::string> words = {program()};
      words.insert(words.end(), arguments.begin(), arguments.end());
      std::vector<char*> argv;
      for (std::string& word : words) argv.push_back(word.data());
      argv.push_back(nullptr);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    constexpr std::chrono::minutes kLimit = kSlowdown * std::chrono::minutes(3);
    const auto deadline = std::chrono::steady_clock::now() + kLimit;
    bool busy = static_cast<bool>(options.meanwhile);
    int status = 0;
    while (::waitpid(child, &status, WNOHANG) == 0) {
      if (busy && options.meanwhile(child)) busy = false;
      terminal.read();
      if (options.hang_up && options.hang_up()) terminal.close();
      if (std::chrono::steady_clock::now() > deadline) {
        ADD_FAILURE() << "still running after " << kLimit.count() << " minutes: " << arguments[0] << "\n"
                      << contents(err);
        ::kill(-child, SIGKILL);
        ::waitpid(child, &status, 0);
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    terminal.read();
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (options.streams == Streams::terminal) return {code, terminal.text(), ""};
    return {code, contents(out), contents(err)};
  }

  /// A configuration that trains in a second or two; the token file has 512 ids.
  std::string config(const std::string& more = "") const {
    std::string tokens;
    std::uint32_t value = 1;
    for (int i = 0; i < 4000; ++i) {
      value = value * 1664525U + 1013904223U;
      const std::uint32_t id = (value >> 16) % 512 * ((value >> 8) % 512) / 512;
      tokens += static_cast<char>(id & 255U);
      tokens += static_cast<char>(id >> 8);
    }
    std::ofstream(path("tokens.bin"), std::ios::binary) << tokens;
    write("run.toml", "[job]\ndump_folder = \"" + path("run") + "\"\n[model]\nflavor = \"debug\"\n[training]\n" +
                          "dataset_path = \"" + path("tokens.bin") + "\"\nseq_len = 32\nlocal_batch_size = 4\n" +
                          "steps = 8\n[lr_scheduler]\nwarmup_steps = 2\n" + more);
    return path("run.toml");
  }

  /// Expects one clear message with the text, the status, no second copy of the message, and no trace of a crash.
  static void expect_one_error(const Outcome& outcome, int status, const std::string& text) {
    EXPECT_EQ(outcome.status, status) << outcome.err;
    EXPECT_EQ(count(outcome.err, text), 1) << outcome.err;
    EXPECT_THAT(outcome.err, Not(HasSubstr("terminate called")));
  }
};

}  // namespace phalanx::cli::program_testing
