// Stage: what a section of the lecture runs on. It starts ranks as threads of this process, collects their lines, and
// keeps the checks.
//
//   stage.on_ranks(4, [](Rank& rank) {
//     at::Tensor x = at::full({1}, rank.number(), rank.floats());
//     rank.say("before", tensor_text(x));
//     rank.comm().all_reduce(x);
//     rank.say("after", tensor_text(x));
//     rank.check(x.item<double>() == 6, "every rank has the sum");
//   });
//
// Output is blocks of text, in this order: the ranks' lines by title, each in the order of the ranks, then the checks.
// A block may have pictures, which a browser shows in its place. A measured value stands behind a "~" (measured()), a
// fact of the machine behind "~ ", so that a program can tell them from what is the same in every run.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/comm/communicator.h"
#include "phalanx/lecture/picture.h"

namespace phalanx::lecture {

struct StageOptions {
  int ranks = 4;  // 1, 2 or 4: of a section that runs one number of ranks, and the most of one that runs several
  at::DeviceType device = at::kCPU;  // another than the CPU: rank r computes on number r of it
  /// From the communicator of host memory that a rank has. Unset: make_device_communicator(). Tests set it.
  std::function<std::shared_ptr<Communicator>(std::shared_ptr<Communicator> host, at::Device device)> make_world = {};
};

class Stage;

/// One rank of Stage::on_ranks(). Only its own thread uses it.
class Rank {
 public:
  Rank(Stage& stage, std::shared_ptr<Communicator> world, at::Device device);

  Communicator& comm() { return *world_; }
  const std::shared_ptr<Communicator>& world() const { return world_; }
  int number() const { return world_->rank(); }
  int ranks() const { return world_->size(); }
  at::Device device() const { return device_; }
  at::TensorOptions floats() const { return at::TensorOptions(at::kFloat).device(device_); }

  /// Shown under `title`, behind the rank's number; once for all ranks if they all say the same. Titles come in the
  /// order in which rank 0 first names them.
  void say(const std::string& title, std::string line);
  /// Holds if it does on every rank.
  void check(bool holds, const std::string& what);

 private:
  friend class Stage;
  Stage& stage_;
  std::shared_ptr<Communicator> world_;
  at::Device device_;
  std::vector<std::pair<std::string, std::string>> lines_;
};

struct Block {
  std::string text;               // lines
  std::vector<Picture> pictures;  // of what the text draws; may be empty
};

class Stage {
 public:
  explicit Stage(StageOptions options);

  int ranks() const { return options_.ranks; }
  /// That of a rank.
  at::Device device(int rank = 0) const;
  /// 1, 2 and 4, up to ranks().
  std::vector<int> worlds() const;

  /// Runs the body on every rank. The first error of any rank is rethrown.
  void on_ranks(int ranks, const std::function<void(Rank&)>& body);
  /// Adds text and a line break.
  void print(const std::string& text) { output_ += text + "\n"; }
  /// What was printed since the last picture is what these show. They end a block.
  void show(std::vector<Picture> pictures);
  void check(bool holds, const std::string& what);

  /// The output since the last call, with the checks at its end.
  std::vector<Block> take_blocks();
  /// Its text alone.
  std::string take_output();
  bool all_hold() const { return all_hold_; }

 private:
  friend class Rank;
  void print_lines(const std::string& title, const std::vector<std::vector<std::pair<std::string, std::string>>>& said);

  StageOptions options_;
  std::string output_;  // of the block that is open
  std::vector<Block> blocks_;
  std::mutex mutex_;  // of the checks, which ranks add to
  std::vector<std::pair<std::string, bool>> checks_;
  bool all_hold_ = true;
};

/// "[0,1.5,2]": elements with at most `digits` significant digits; a matrix as one bracket a row.
std::string tensor_text(const at::Tensor& tensor, int digits = 4);
/// "~1.23": a value that differs from run to run, with three significant digits.
std::string measured(double value);
/// Whether the two have one shape and their elements differ by at most `tolerance` times the largest of `expected`.
bool are_close(const at::Tensor& found, const at::Tensor& expected, double tolerance = 1e-5);

}  // namespace phalanx::lecture
