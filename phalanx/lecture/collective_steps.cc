#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>

#include "phalanx/lecture/flow.h"
#include "phalanx/lecture/ring.h"
#include "phalanx/lecture/steps.h"
#include "phalanx/lecture/tree.h"

namespace phalanx::lecture {
namespace {

struct Drawing {
  std::string name;
  std::vector<std::string> before, after;  // by rank
};

std::string without_blanks_at_end(const std::string& line) { return line.substr(0, line.find_last_not_of(' ') + 1); }

/// "A----->A": what a rank has before, and after.
std::string drawn(const std::string& before, const std::string& after) {
  return fmt::format("{:-<7}>{}", before, after);
}

/// One drawing beside the other, a line a rank.
void print_row(Stage& stage, const std::vector<Drawing>& drawings, bool is_last = false) {
  constexpr int kWidth = 38;
  std::string head;
  for (const Drawing& drawing : drawings) head += fmt::format("{:<{}}", drawing.name, kWidth);
  stage.print("        " + without_blanks_at_end(head));
  for (std::size_t rank = 0; rank < drawings.front().before.size(); ++rank) {
    std::string line = fmt::format("rank {}  ", rank);
    for (const Drawing& drawing : drawings) {
      line += fmt::format("{:<{}}", drawn(drawing.before[rank], drawing.after[rank]), kWidth);
    }
    stage.print(without_blanks_at_end(line));
  }
  if (!is_last) stage.print("");
}

/// The parts of a drawing's text: "ABCD" is four, "a0..3" a0 to a3, "a0,b0" two, a sum one, "." none.
std::vector<std::string> parts_of(const std::string& text) {
  if (text == ".") return {};
  if (text.find('+') != std::string::npos) return {text};
  std::vector<std::string> parts;
  if (text.ends_with("..3")) {
    for (int i = 0; i < 4; ++i) parts.push_back(fmt::format("{}{}", text[0], i));
  } else if (text.find(',') != std::string::npos) {
    for (std::size_t i = 0; i < text.size(); i += 3) parts.push_back(text.substr(i, 2));
  } else {
    for (const char letter : text) parts.emplace_back(1, letter);
  }
  return parts;
}

void draw_parts(Picture& picture, double x, double y, const std::string& text) {
  constexpr double kPart = 26, kSum = 92;
  for (const std::string& part : parts_of(text)) {
    const bool is_sum = part.size() > 2;
    picture.box({x, y, is_sum ? kSum : kPart - 2, 20}, part,
                is_sum ? "sum" : fmt::format("t{}", std::tolower(part[0]) - 'a'));
    x += kPart;
  }
}

Picture picture_of(const Drawing& drawing) {
  constexpr double kBefore = 52, kArrow = 160, kAfter = 196, kRow = 26;
  Picture picture(kAfter + 104, kRow * static_cast<double>(drawing.before.size()), drawing.name);
  for (std::size_t rank = 0; rank < drawing.before.size(); ++rank) {
    const double y = kRow * static_cast<double>(rank);
    picture.text(0, y + 14, fmt::format("rank {}", rank));
    draw_parts(picture, kBefore, y, drawing.before[rank]);
    if (drawing.after[rank] != ".") picture.arrow(kArrow, y + 10, kAfter - 6, y + 10);
    draw_parts(picture, kAfter, y, drawing.after[rank]);
  }
  return picture;
}

/// One value for each rank.
template <class Make>
std::vector<std::string> by_rank(int ranks, const Make& make) {
  std::vector<std::string> values;
  for (int rank = 0; rank < ranks; ++rank) values.push_back(make(rank));
  return values;
}

std::string letter(int rank) { return std::string(1, static_cast<char>('A' + rank)); }

}  // namespace

void draw_collectives(Stage& stage) {
  constexpr int kRanks = 4;
  const auto own = by_rank(kRanks, [](int r) { return letter(r); });
  const auto numbered = [&](char first) {  // a0 a1 a2 a3, b0 ...
    return by_rank(kRanks, [&](int r) { return fmt::format("{}0..3", static_cast<char>(first + r)); });
  };
  const auto only_root = [](const std::string& value) {
    return by_rank(kRanks, [&](int r) { return r == 0 ? value : std::string("."); });
  };
  const auto everywhere = [](const std::string& value) { return by_rank(kRanks, [&](int) { return value; }); };
  const std::string all = "ABCD", sum = "A+B+C+D";
  const std::vector<Drawing> drawings = {
      {"broadcast: one to all", only_root("A"), everywhere("A")},
      {"reduce: its inverse, with a sum", own, only_root(sum)},
      {"scatter: a part to each", only_root("ABCD"), own},
      {"gather: its inverse", own, only_root(all)},
      {"all-gather: gather, to all", own, everywhere(all)},
      {"all-reduce: reduce, to all", own, everywhere(sum)},
      {"reduce-scatter: parts of the sum", numbered('a'),
       by_rank(kRanks, [](int r) { return fmt::format("a{0}+b{0}+c{0}+d{0}", r); })},
      {"all-to-all: part j of rank i to j", numbered('a'),
       by_rank(kRanks, [](int r) { return fmt::format("a{0},b{0},c{0},d{0}", r); })}};
  std::vector<Picture> pictures;
  for (std::size_t i = 0; i < drawings.size(); i += 2) {
    print_row(stage, {drawings[i], drawings[i + 1]}, i + 2 == drawings.size());
    pictures.push_back(picture_of(drawings[i]));
    pictures.push_back(picture_of(drawings[i + 1]));
  }
  stage.show(std::move(pictures));
}

void run_collectives(Stage& stage) {
  const int n = stage.ranks();
  Flow flow(n);
  stage.on_ranks(n, [&](Rank& rank) {
    Communicator& comm = rank.comm();
    const bool is_root = rank.number() == 0;
    const auto mine = [&] { return at::arange(n, rank.floats()) + rank.number(); };
    const auto show = [&](const std::string& title, const at::Tensor& before, const at::Tensor& after) {
      flow.add(rank, title, fmt::format("{}>{}", tensor_text(before), tensor_text(after)));
    };
    at::Tensor x = mine();
    comm.broadcast(x, {.root = 0});
    show("broadcast", mine(), x);
    x = mine();
    comm.reduce(x, {.root = 0});
    show("reduce", mine(), x);
    const at::Tensor one = at::full({1}, 10.0 * rank.number(), rank.floats());
    at::Tensor whole = is_root ? at::zeros({n}, rank.floats()) : at::Tensor();
    comm.gather(whole, one, {.root = 0});
    show("gather", one, whole);
    at::Tensor part = at::zeros({1}, rank.floats());
    comm.scatter(part, whole, {.root = 0});
    show("scatter", whole, part);
    rank.check(at::equal(part, one), "scatter undoes gather");
    at::Tensor sum = mine();
    comm.all_reduce(sum);
    show("all_reduce", mine(), sum);
    comm.reduce_scatter(part, mine());
    show("reduce_scatter", mine(), part);
    at::Tensor gathered = at::zeros({n}, rank.floats());
    comm.all_gather(gathered, part);
    show("all_gather", part, gathered);
    rank.check(at::equal(gathered, sum), "reduce_scatter, then all_gather, is all_reduce");
    const at::Tensor closed_form = at::arange(n, rank.floats()) * n + n * (n - 1) / 2;
    rank.check(at::equal(sum, closed_form), fmt::format("all_reduce gives {}", tensor_text(closed_form)));
    const at::Tensor letters = at::arange(n, rank.floats()) + 10 * rank.number();
    at::Tensor exchanged = at::zeros({n}, rank.floats());
    comm.all_to_all(exchanged, letters);
    show("all_to_all", letters, exchanged);
  });
  flow.show(stage, "before and after, on each rank");
}

namespace {

/// What all ranks hold after each step of an algorithm: written by the ranks, each its own part.
class Recording {
 public:
  explicit Recording(int ranks) : steps_(static_cast<std::size_t>(ranks)) {}

  /// x, a number a cell of so many digits: which ranks are in it.
  void add(Rank& rank, const std::string& title, const at::Tensor& x) {
    std::vector<std::string> cells;
    for (std::int64_t c = 0; c < x.numel(); ++c) {
      cells.push_back(fmt::format("{:0{}.0f}", x[c].item<double>(), rank.ranks()));
    }
    steps_[static_cast<std::size_t>(rank.number())].emplace_back(title, cells);
  }
  std::size_t count() const { return steps_.front().size(); }
  /// A line a step, a column a rank.
  void print(Stage& stage) const {
    std::size_t left = 0, width = 0;
    for (const auto& [title, cells] : steps_.front()) {
      left = std::max(left, title.size() + 2);
      width = std::max(width, cells.size() * (cells.front().size() + 1) + 1);
    }
    std::string head(left, ' ');
    for (std::size_t rank = 0; rank < steps_.size(); ++rank)
      head += fmt::format("{:<{}}", fmt::format("rank {}", rank), width);
    stage.print(without_blanks_at_end(head));
    for (std::size_t step = 0; step < count(); ++step) {
      std::string line = fmt::format("{:<{}}", steps_.front()[step].first, left);
      for (const auto& of_rank : steps_)
        line += fmt::format("{:<{}}", fmt::format("{}", fmt::join(of_rank[step].second, "|")), width);
      stage.print(without_blanks_at_end(line));
    }
  }
  Picture picture(std::size_t step, const std::vector<Transfer>& transfers) const {
    std::vector<std::vector<std::string>> cells;
    for (const auto& of_rank : steps_) cells.push_back(of_rank[step].second);
    const std::string& title = steps_.front()[step].first;
    return picture_of_state(title.substr(0, title.find(':')), cells, transfers);
  }

 private:
  std::vector<std::vector<std::pair<std::string, std::vector<std::string>>>> steps_;  // by rank
};

/// Element c of rank r is 10^r: the digits of a sum say which ranks are in it.
at::Tensor digit_of(Rank& rank, std::int64_t elements) {
  return at::full({elements}, std::pow(10.0, rank.number()), rank.floats());
}

/// Prints the steps, and shows a picture of each. `transfers_of(step)`: what moves in it, from step 1 on.
template <class TransfersOf>
void show_steps(Stage& stage, Recording& recording, const TransfersOf& transfers_of) {
  recording.print(stage);
  std::vector<Picture> pictures;
  for (std::size_t step = 0; step < recording.count(); ++step) {
    pictures.push_back(
        recording.picture(step, step == 0 ? std::vector<Transfer>() : transfers_of(static_cast<int>(step))));
  }
  stage.show(std::move(pictures));
}

}  // namespace

void ring_steps(Stage& stage) {
  const int n = stage.ranks();
  Recording recording(n);
  const auto chunk_sent = [n](int rank, int step) {  // as in ring.cc; steps are counted from 1
    return ((step < n ? rank - step + 1 : rank + n + 1 - step) + 2 * n) % n;
  };
  const auto transfers_of = [&](int step) {
    std::vector<Transfer> transfers;
    for (int rank = 0; rank < n; ++rank) transfers.push_back({rank, (rank + 1) % n, chunk_sent(rank, step)});
    return transfers;
  };
  stage.on_ranks(n, [&](Rank& rank) {
    at::Tensor x = digit_of(rank, n);
    at::Tensor expected = x.clone();
    recording.add(rank, "before", x);
    int step = 0;
    const std::int64_t sent = ring_all_reduce(rank.comm(), x, [&](const std::string& title) {
      std::string links;
      for (const Transfer& transfer : transfers_of(++step))
        links += fmt::format("{}-c{}->", transfer.from, transfer.column);
      recording.add(rank, fmt::format("{}: {}0", title, links), x);
    });
    rank.comm().all_reduce(expected);
    rank.check(at::equal(x, expected), "the ring gives what all_reduce gives");
    rank.check(sent == 2 * (n - 1), "each rank sent 2(n-1)/n of the array");
  });
  show_steps(stage, recording, transfers_of);
}

void tree_steps(Stage& stage) {
  const int n = stage.ranks();
  const std::vector<Tree> trees = two_trees(n);
  const auto transfers_of = [&](int step) {  // 1 up to the height: sums go up, then they come down
    std::vector<Transfer> transfers;
    for (int half = 0; half < 2; ++half) {
      for (const TreeEdge& edge : edges_of_step(trees[static_cast<std::size_t>(half)], step)) {
        transfers.push_back({edge.from, edge.to, half});
      }
    }
    return transfers;
  };
  Recording recording(n);
  stage.on_ranks(n, [&](Rank& rank) {
    at::Tensor x = digit_of(rank, 2);
    at::Tensor expected = x.clone();
    recording.add(rank, "before", x);
    int step = 0;
    tree_all_reduce(rank.comm(), x, trees, [&](const std::string& title) {
      std::string edges[2];
      for (const Transfer& transfer : transfers_of(++step)) {
        std::string& of_tree = edges[transfer.column];
        of_tree += fmt::format("{}{}->{}", of_tree.empty() ? "" : ",", transfer.from, transfer.to);
      }
      recording.add(rank, fmt::format("{}: {}|{}", title, edges[0], edges[1]), x);
    });
    rank.comm().all_reduce(expected);
    rank.check(at::equal(x, expected), "the two trees give what all_reduce gives");
  });
  show_steps(stage, recording, transfers_of);
}

namespace {

void print_tree(Stage& stage, const Tree& tree) {
  const int n = static_cast<int>(tree.size());
  for (int depth = 0; depth <= height_of(tree); ++depth) {
    std::string line;
    for (int rank = 0; rank < n; ++rank) {
      const int parent = tree[static_cast<std::size_t>(rank)];
      line += depth_in(tree, rank) == depth
                  ? fmt::format("{:<8}", parent < 0 ? fmt::format("{}", rank) : fmt::format("{}->{}", rank, parent))
                  : std::string(8, ' ');
    }
    stage.print("  " + without_blanks_at_end(line));
  }
}

Picture picture_of_tree(const std::string& title, const Tree& tree) {
  constexpr double kAcross = 38, kDown = 44, kSize = 22;
  const auto x_of = [](int rank) { return 2 + kAcross * rank; };
  const auto y_of = [&](int rank) { return kDown * depth_in(tree, rank); };
  const int n = static_cast<int>(tree.size());
  Picture picture(x_of(n), kDown * height_of(tree) + kSize + 4, title);
  for (int rank = 0; rank < n; ++rank) {
    const int parent = tree[static_cast<std::size_t>(rank)];
    picture.box({x_of(rank), y_of(rank), kSize, kSize}, fmt::format("{}", rank),
                children_of(tree, rank) == 0 ? "plain" : "t0");
    if (parent >= 0)
      picture.arrow(x_of(rank) + kSize / 2, y_of(rank), x_of(parent) + kSize / 2, y_of(parent) + kSize + 3);
  }
  return picture;
}

}  // namespace

void draw_trees(Stage& stage) {
  constexpr int kRanks = 8;
  const std::vector<Tree> trees = two_trees(kRanks);
  stage.print("first tree, for one half of the data (3->2: rank 3 sends its sum to rank 2)");
  print_tree(stage, trees[0]);
  stage.print("second tree, for the other half");
  print_tree(stage, trees[1]);
  stage.show({picture_of_tree("first tree, for one half of the data", trees[0]),
              picture_of_tree("second tree, for the other half", trees[1])});
  bool once = true;
  for (int rank = 0; rank < kRanks; ++rank)
    once = once && (children_of(trees[0], rank) == 0 || children_of(trees[1], rank) == 0);
  stage.check(once, "no rank has children in both trees");
}

void cost_models(Stage& stage) {
  constexpr double kLatency = 5e-6, kBandwidth = 50e9;  // of one message; of a link in one direction
  stage.print("all_reduce of S bytes, a link of 50 GB/s, 5 us a message; times in us");
  stage.print(fmt::format("{:>8} {:>9} {:>12} {:>12}  {}", "ranks", "S", "ring", "two trees", "faster"));
  for (const int n : {8, 512}) {
    for (const double bytes : {1e3, 1e9}) {
      const double ring = 2 * (n - 1) * kLatency + 2.0 * (n - 1) / n * bytes / kBandwidth;
      const double tree = 2 * std::log2(n) * kLatency + 2 * bytes / kBandwidth;
      const bool faster_ring = ring < tree;
      const char* size = bytes < 1e9 ? "1 KB" : "1 GB";
      stage.print(fmt::format("{:>8} {:>9} {:>12.0f} {:>12.0f}  {}", n, size, ring * 1e6, tree * 1e6,
                              faster_ring ? "ring" : "tree"));
    }
  }
}

}  // namespace phalanx::lecture
