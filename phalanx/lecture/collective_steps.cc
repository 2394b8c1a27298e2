#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "phalanx/lecture/ring.h"
#include "phalanx/lecture/steps.h"

namespace phalanx::lecture {
namespace {

struct Drawing {
  std::string name;
  std::vector<std::string> before, after;  // by rank
};

std::string without_blanks_at_end(const std::string& line) { return line.substr(0, line.find_last_not_of(' ') + 1); }

/// One drawing beside the other, a line a rank.
void print_row(Stage& stage, const std::vector<Drawing>& drawings, bool is_last = false) {
  constexpr int kBefore = 7, kWidth = 38;
  std::string head;
  for (const Drawing& drawing : drawings) head += fmt::format("{:<{}}", drawing.name, kWidth);
  stage.print("        " + without_blanks_at_end(head));
  for (std::size_t rank = 0; rank < drawings.front().before.size(); ++rank) {
    std::string line = fmt::format("rank {}  ", rank);
    for (const Drawing& drawing : drawings) {
      const std::string cell = fmt::format("{:<{}}-> {}", drawing.before[rank], kBefore, drawing.after[rank]);
      line += fmt::format("{:<{}}", cell, kWidth);
    }
    stage.print(without_blanks_at_end(line));
  }
  if (!is_last) stage.print("");
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
  print_row(stage, {{"broadcast: one to all", only_root("A"), everywhere("A")},
                    {"reduce: its inverse, with a sum", own, only_root(sum)}});
  print_row(stage, {{"scatter: a part to each", only_root("ABCD"), own}, {"gather: its inverse", own, only_root(all)}});
  print_row(stage, {{"all-gather: gather, to all", own, everywhere(all)},
                    {"all-reduce: reduce, to all", own, everywhere(sum)}});
  print_row(stage,
            {{"reduce-scatter: parts of the sum", numbered('a'),
              by_rank(kRanks, [](int r) { return fmt::format("a{0}+b{0}+c{0}+d{0}", r); })},
             {"all-to-all: part j of rank i to j", numbered('a'),
              by_rank(kRanks, [](int r) { return fmt::format("a{0},b{0},c{0},d{0}", r); })}},
            /*is_last=*/true);
}

void run_collectives(Stage& stage) {
  const int n = stage.ranks();
  stage.on_ranks(n, [n](Rank& rank) {
    Communicator& comm = rank.comm();
    const bool is_root = rank.number() == 0;
    const auto mine = [&] { return at::arange(n, rank.floats()) + rank.number(); };
    const auto show = [&](const std::string& title, const at::Tensor& before, const at::Tensor& after) {
      rank.say(title, fmt::format("{:<10} -> {}", tensor_text(before), tensor_text(after)));
    };
    at::Tensor x = mine();
    comm.broadcast(x, {.root = 0});
    show("broadcast from rank 0", mine(), x);
    x = mine();
    comm.reduce(x, {.root = 0});
    show("reduce to rank 0: the others keep what they had", mine(), x);
    const at::Tensor one = at::full({1}, 10.0 * rank.number(), rank.floats());
    at::Tensor whole = is_root ? at::zeros({n}, rank.floats()) : at::Tensor();
    comm.gather(whole, one, {.root = 0});
    show("gather to rank 0", one, whole);
    at::Tensor part = at::zeros({1}, rank.floats());
    comm.scatter(part, whole, {.root = 0});
    show("scatter of that from rank 0: everybody has its own again", whole, part);
    rank.check(at::equal(part, one), "scatter undoes gather");
    at::Tensor sum = mine();
    comm.all_reduce(sum);
    show("all_reduce", mine(), sum);
    comm.reduce_scatter(part, mine());
    show("reduce_scatter: rank r has element r of the sum", mine(), part);
    at::Tensor gathered = at::zeros({n}, rank.floats());
    comm.all_gather(gathered, part);
    show("all_gather of those parts", part, gathered);
    rank.check(at::equal(gathered, sum), "reduce_scatter, then all_gather, is all_reduce");
    const at::Tensor closed_form = at::arange(n, rank.floats()) * n + n * (n - 1) / 2;
    rank.check(at::equal(sum, closed_form), fmt::format("all_reduce gives {}", tensor_text(closed_form)));
    const at::Tensor letters = at::arange(n, rank.floats()) + 10 * rank.number();
    at::Tensor exchanged = at::zeros({n}, rank.floats());
    comm.all_to_all(exchanged, letters);
    show("all_to_all: element j of rank i becomes element i of rank j", letters, exchanged);
  });
}

void ring_steps(Stage& stage) {
  const int n = stage.ranks();
  stage.on_ranks(n, [n](Rank& rank) {
    // Element c of rank r is 10^r: the digits of a sum say which ranks are in it.
    at::Tensor x = at::full({n}, std::pow(10.0, rank.number()), rank.floats());
    at::Tensor expected = x.clone();
    const auto show = [&](const std::string& title) {
      std::string cells;
      for (int c = 0; c < n; ++c) cells += fmt::format("{}{:0{}.0f}", c == 0 ? "" : "|", x[c].item<double>(), n);
      rank.say(title, cells);
    };
    show("before: a digit for each rank, from the right");
    const std::int64_t sent = ring_all_reduce(rank.comm(), x, show);
    rank.comm().all_reduce(expected);
    rank.check(at::equal(x, expected), "the ring gives what all_reduce gives");
    rank.check(sent == 2 * (n - 1),
               fmt::format("every rank sent 2 (n - 1) / n times the array: {} elements for {}", 2 * (n - 1), n));
  });
}

namespace {

/// An in-order binary tree over [0, n): parent of each rank, -1 of the root. Odd ranks have no children.
std::vector<int> tree_parents(int n) {
  std::vector<int> parents(static_cast<std::size_t>(n), -1);
  for (int rank = 1; rank < n; ++rank) {
    const int bit = rank & -rank;
    int parent = (rank ^ bit) | (bit << 1);
    if (parent >= n) parent = rank ^ bit;
    parents[static_cast<std::size_t>(rank)] = parent;
  }
  return parents;
}

int children_of(const std::vector<int>& parents, int rank) {
  return static_cast<int>(std::count(parents.begin(), parents.end(), rank));
}

void print_tree(Stage& stage, const std::vector<int>& parents) {
  const auto depth_of = [&](int rank) {
    int depth = 0;
    for (; parents[static_cast<std::size_t>(rank)] >= 0; ++depth) rank = parents[static_cast<std::size_t>(rank)];
    return depth;
  };
  int deepest = 0;
  const int n = static_cast<int>(parents.size());
  for (int rank = 0; rank < n; ++rank) deepest = std::max(deepest, depth_of(rank));
  for (int depth = 0; depth <= deepest; ++depth) {
    std::string line;
    for (int rank = 0; rank < n; ++rank) {
      const int parent = parents[static_cast<std::size_t>(rank)];
      line += depth_of(rank) == depth
                  ? fmt::format("{:<8}", parent < 0 ? fmt::format("{}", rank) : fmt::format("{}->{}", rank, parent))
                  : std::string(8, ' ');
    }
    stage.print("  " + without_blanks_at_end(line));
  }
}

}  // namespace

void draw_trees(Stage& stage) {
  constexpr int kRanks = 8;
  const std::vector<int> first = tree_parents(kRanks);
  std::vector<int> second;  // the same tree over the mirrored numbers
  for (int rank = 0; rank < kRanks; ++rank) {
    const int parent = first[static_cast<std::size_t>(kRanks - 1 - rank)];
    second.push_back(parent < 0 ? -1 : kRanks - 1 - parent);
  }
  stage.print("first tree, for one half of the data (3->2: rank 3 sends its sum to rank 2)");
  print_tree(stage, first);
  stage.print("second tree, for the other half");
  print_tree(stage, second);
  bool once = true;
  for (int rank = 0; rank < kRanks; ++rank)
    once = once && (children_of(first, rank) == 0 || children_of(second, rank) == 0);
  stage.check(once, "no rank has children in both trees");
}

void cost_models(Stage& stage) {
  constexpr double kLatency = 5e-6, kBandwidth = 50e9;  // of one message; of a link in one direction
  stage.print("all_reduce of S bytes, a link of 50 GB/s, 5 us a message; times in us");
  stage.print(fmt::format("{:>8} {:>9} {:>12} {:>12}  {}", "ranks", "S", "ring", "two trees", "faster"));
  bool ring_wins = false, tree_wins = false;
  for (const int n : {8, 512}) {
    for (const double bytes : {1e3, 1e6, 1e9}) {
      const double ring = 2 * (n - 1) * kLatency + 2.0 * (n - 1) / n * bytes / kBandwidth;
      const double tree = 2 * std::log2(n) * kLatency + 2 * bytes / kBandwidth;
      const bool faster_ring = ring < tree;
      ring_wins = ring_wins || faster_ring;
      tree_wins = tree_wins || !faster_ring;
      const char* size = bytes < 1e6 ? "1 KB" : bytes < 1e9 ? "1 MB" : "1 GB";
      stage.print(fmt::format("{:>8} {:>9} {:>12.0f} {:>12.0f}  {}", n, size, ring * 1e6, tree * 1e6,
                              faster_ring ? "ring" : "tree"));
    }
  }
  stage.check(ring_wins && tree_wins, "neither is the faster one everywhere");
}

}  // namespace phalanx::lecture
