// The options of `phalanx bench comm`, and the list of cases that it measures. Torch-free.
//
// Sizes and bandwidths follow nccl-tests. A case's `bytes` is the size S of the whole array. It is the larger buffer of
// a rank (the data of all ranks for all_gather, reduce_scatter, gather, scatter, all_to_all). With t seconds per call:
//
//   algbw = S / t            busbw = algbw * bus_factor(verb, n)            GB = 1e9 bytes
//
//   all_reduce 2(n-1)/n;  all_gather, reduce_scatter, gather, scatter, all_to_all (n-1)/n;
//   broadcast, reduce, sendrecv, pingpong 1
//
// sendrecv: every rank sends S to the next rank and receives S from the previous one at the same time. pingpong: rank 0
// sends S to rank 1 and gets it back; t is half of the round trip. barrier moves no data; it has one row, with times
// only.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/comm/types.h"

namespace phalanx::measure {

enum class BenchVerb : std::uint8_t {
  all_reduce,
  all_gather,
  reduce_scatter,
  broadcast,
  reduce,
  gather,
  scatter,
  all_to_all,
  sendrecv,
  pingpong,
  barrier
};

/// Where the result goes: into the input buffer (in-place), or into another buffer.
enum class Place : std::uint8_t { in, out };

struct CommBenchOptions {
  std::vector<std::string> backends{
      "auto"};  // auto, shm, symmetric, heap, gloo, local (threads of rank 0), c10d (torch's own gloo), ...
  std::vector<BenchVerb> verbs{BenchVerb::all_reduce, BenchVerb::all_gather, BenchVerb::reduce_scatter,
                               BenchVerb::broadcast,  BenchVerb::all_to_all, BenchVerb::pingpong};
  std::vector<std::int64_t> sizes;  // bytes; rounded down to a multiple for n ranks, at least one element per rank
  std::vector<DataType> types{DataType::f32};
  std::vector<ReduceOp> ops{ReduceOp::sum};
  std::vector<Place> places{Place::out};  // a verb that has only one form is measured in that form
  int root = 0;
  int warmup = 3;               // calls before the timed ones
  std::int64_t iterations = 0;  // timed calls; 0: as many as fit into budget_seconds, 7 to 5,000
  double budget_seconds = 0.2;  // for each round of each backend
  int rounds = 3;               // the backends take turns; the round with the smallest median counts
  bool check = true;            // check the result of one call on known values
  bool copy = true;             // measure the copy roofline
  bool pin = false;             // bind rank r to the r-th usable core
  std::string device = "cpu";   // or cuda
};

struct CommBenchCase {
  BenchVerb verb = BenchVerb::all_reduce;
  DataType type = DataType::f32;
  ReduceOp op = ReduceOp::sum;
  Place place = Place::in;
  int root = 0;
  std::int64_t count = 0;  // elements of the whole array; 0 for barrier
  std::int64_t bytes() const { return count * static_cast<std::int64_t>(element_size(type)); }
};

/// The cases in the order of measurement: by verb, type, op, place, size.
std::vector<CommBenchCase> bench_cases(const CommBenchOptions& options, int ranks);

double bus_factor(BenchVerb verb, int ranks);
bool reduces(BenchVerb verb);
bool is_rooted(BenchVerb verb);

std::string_view name_of(BenchVerb verb);
std::string_view name_of(Place place);
std::string_view text_of(DataType type);  // "float32", ...: name_of() lives in a library that links torch
std::string_view text_of(ReduceOp op);
std::string size_text(std::int64_t bytes);  // "64K", "1M", "1000": binary units where they fit

/// Each throws a UsageError that names `flag`. Verbs may also be "all"; types may also have nccl-tests' names (float,
/// half, ...).
std::vector<BenchVerb> parse_verbs(const std::string& flag, const std::string& list);
std::vector<DataType> parse_types(const std::string& flag, const std::string& list);
std::vector<ReduceOp> parse_ops(const std::string& flag, const std::string& list);
std::vector<Place> parse_places(const std::string& flag, const std::string& text);  // in, out, both
/// from, from * factor, ... or from, from + step, ... (if step is not 0), up to `to`.
std::vector<std::int64_t> size_range(std::int64_t from, std::int64_t to, double factor, std::int64_t step);
/// Checks combinations of options: avg of integers, a root that is not a rank, numbers out of range. Throws UsageError.
void check_options(const CommBenchOptions& options, int ranks);

}  // namespace phalanx::measure
