#include "phalanx/measure/comm_bench_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "phalanx/base/dtype_names.h"
#include "phalanx/base/error.h"
#include "phalanx/base/nearest.h"
#include "phalanx/base/parse_text.h"

namespace phalanx::measure {
namespace {

template <class Value>
using Names = std::vector<std::pair<std::string, Value>>;

const Names<BenchVerb>& verb_names() {
  static const Names<BenchVerb> names{{"all_reduce", BenchVerb::all_reduce},
                                      {"all_gather", BenchVerb::all_gather},
                                      {"reduce_scatter", BenchVerb::reduce_scatter},
                                      {"broadcast", BenchVerb::broadcast},
                                      {"reduce", BenchVerb::reduce},
                                      {"gather", BenchVerb::gather},
                                      {"scatter", BenchVerb::scatter},
                                      {"all_to_all", BenchVerb::all_to_all},
                                      {"sendrecv", BenchVerb::sendrecv},
                                      {"pingpong", BenchVerb::pingpong},
                                      {"barrier", BenchVerb::barrier}};
  return names;
}

const Names<DataType>& type_names() {
  static const Names<DataType> names{
      {"float32", DataType::f32}, {"float64", DataType::f64}, {"float16", DataType::f16}, {"bfloat16", DataType::bf16},
      {"int32", DataType::i32},   {"int64", DataType::i64},   {"uint8", DataType::u8},    {"bool", DataType::boolean},
      {"i32", DataType::i32},     {"i64", DataType::i64},     {"u8", DataType::u8}};
  return names;
}

const Names<ReduceOp>& op_names() {
  static const Names<ReduceOp> names{{"sum", ReduceOp::sum},         {"avg", ReduceOp::avg},
                                     {"min", ReduceOp::min},         {"max", ReduceOp::max},
                                     {"product", ReduceOp::product}, {"prod", ReduceOp::product}};
  return names;
}

/// Parses a list of names. The first `distinct` names are our own; they are used for "all" and in the error.
template <class Value>
std::vector<Value> parse_names(const std::string& flag, const std::string& list, const Names<Value>& names,
                               std::size_t distinct) {
  std::vector<Value> values;
  for (const std::string& item : split_list(list)) {
    if (item == "all") {
      for (std::size_t i = 0; i < distinct; ++i) values.push_back(names[i].second);
      continue;
    }
    const auto found = std::ranges::find(names, item, &std::pair<std::string, Value>::first);
    if (found == names.end()) {
      std::vector<std::string> known;
      for (std::size_t i = 0; i < distinct; ++i) known.push_back(names[i].first);
      throw UsageError(fmt::format("{}: '{}' is not known{}; expected some of {}, or all", flag, item,
                                   did_you_mean(item, known), fmt::join(known, ", ")));
    }
    values.push_back(found->second);
  }
  return values;
}

bool is_integral(DataType type) {
  return type == DataType::i32 || type == DataType::i64 || type == DataType::u8 || type == DataType::boolean;
}

bool has_both_places(BenchVerb verb) {
  return verb == BenchVerb::all_gather || verb == BenchVerb::reduce_scatter || verb == BenchVerb::gather ||
         verb == BenchVerb::scatter;
}

/// The requested places in which a verb can be measured.
std::vector<Place> places_of(BenchVerb verb, const std::vector<Place>& wanted) {
  if (has_both_places(verb)) return wanted;
  return {verb == BenchVerb::all_to_all || verb == BenchVerb::sendrecv ? Place::out : Place::in};
}

}  // namespace

std::vector<CommBenchCase> bench_cases(const CommBenchOptions& options, int ranks) {
  std::vector<CommBenchCase> cases;
  for (const BenchVerb verb : options.verbs) {
    if (verb == BenchVerb::barrier) {
      cases.push_back({.verb = verb, .place = Place::in, .root = options.root});
      continue;
    }
    for (const DataType type : options.types) {
      for (const ReduceOp op : reduces(verb) ? options.ops : std::vector<ReduceOp>{ReduceOp::sum}) {
        for (const Place place : places_of(verb, options.places)) {
          for (const std::int64_t bytes : options.sizes) {
            const auto count = bytes / static_cast<std::int64_t>(element_size(type));
            cases.push_back({verb, type, op, place, options.root, std::max<std::int64_t>(1, count / ranks) * ranks});
          }
        }
      }
    }
  }
  return cases;
}

double bus_factor(BenchVerb verb, int ranks) {
  const double n = ranks;
  switch (verb) {
    case BenchVerb::all_reduce:
      return 2 * (n - 1) / n;
    case BenchVerb::all_gather:
    case BenchVerb::reduce_scatter:
    case BenchVerb::gather:
    case BenchVerb::scatter:
    case BenchVerb::all_to_all:
      return (n - 1) / n;
    case BenchVerb::broadcast:
    case BenchVerb::reduce:
    case BenchVerb::sendrecv:
    case BenchVerb::pingpong:
    case BenchVerb::barrier:
      return 1;
  }
  return 1;
}

bool reduces(BenchVerb verb) {
  return verb == BenchVerb::all_reduce || verb == BenchVerb::reduce || verb == BenchVerb::reduce_scatter;
}

bool is_rooted(BenchVerb verb) {
  return verb == BenchVerb::broadcast || verb == BenchVerb::reduce || verb == BenchVerb::gather ||
         verb == BenchVerb::scatter;
}

std::string_view name_of(BenchVerb verb) { return verb_names()[static_cast<std::size_t>(verb)].first; }

std::string_view name_of(Place place) { return place == Place::in ? "in" : "out"; }

std::string_view text_of(DataType type) {
  return std::ranges::find(type_names(), type, &std::pair<std::string, DataType>::second)->first;
}

std::string_view text_of(ReduceOp op) {
  return std::ranges::find(op_names(), op, &std::pair<std::string, ReduceOp>::second)->first;
}

std::string size_text(std::int64_t bytes) {
  constexpr std::array kUnits{std::pair{30, 'G'}, std::pair{20, 'M'}, std::pair{10, 'K'}};
  for (const auto& [shift, unit] : kUnits) {
    if (bytes > 0 && bytes % (std::int64_t{1} << shift) == 0) return fmt::format("{}{}", bytes >> shift, unit);
  }
  return fmt::format("{}", bytes);
}

std::vector<BenchVerb> parse_verbs(const std::string& flag, const std::string& list) {
  return parse_names(flag, list, verb_names(), verb_names().size());
}

std::vector<DataType> parse_types(const std::string& flag, const std::string& list) {
  std::vector<std::string> types = split_list(list);
  for (std::string& type : types) type = canonical_dtype(type);
  return parse_names(flag, fmt::format("{}", fmt::join(types, ",")), type_names(), 8);
}

std::vector<ReduceOp> parse_ops(const std::string& flag, const std::string& list) {
  return parse_names(flag, list, op_names(), 5);
}

std::vector<Place> parse_places(const std::string& flag, const std::string& text) {
  if (text == "in") return {Place::in};
  if (text == "out") return {Place::out};
  if (text == "both") return {Place::out, Place::in};
  throw UsageError(fmt::format("{} is '{}': expected in, out or both", flag, text));
}

std::vector<std::int64_t> size_range(std::int64_t from, std::int64_t to, double factor, std::int64_t step) {
  if (from < 1 || to < from) {
    throw UsageError(
        fmt::format("sizes from {} to {} bytes: expected at least 1, and the second not the smaller", from, to));
  }
  if (step == 0 && factor <= 1) throw UsageError(fmt::format("the step factor is {}: expected more than 1", factor));
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = from; size <= to;) {
    sizes.push_back(size);
    if (sizes.size() > 10'000) throw UsageError("more than 10,000 sizes: choose a larger step");
    const auto scaled = static_cast<std::int64_t>(std::llround(static_cast<double>(size) * factor));
    size = step > 0 ? size + step : std::max(size + 1, scaled);
  }
  return sizes;
}

void check_options(const CommBenchOptions& options, int ranks) {
  const auto refuse = [](const std::string& text) { throw UsageError(text); };
  if (options.rounds < 1) refuse(fmt::format("--rounds is {}: expected 1 or more", options.rounds));
  if (options.warmup < 0) refuse(fmt::format("--warmup is {}: expected 0 or more", options.warmup));
  if (options.iterations < 0) refuse(fmt::format("--iters is {}: expected 1 or more", options.iterations));
  if (!(options.budget_seconds > 0) || options.budget_seconds > 3600) {
    refuse(fmt::format("--budget-s is {}: expected a number of seconds above 0", options.budget_seconds));
  }
  if (options.root < 0 || options.root >= ranks) {
    refuse(fmt::format("--root is {}: expected a rank, 0 to {}", options.root, ranks - 1));
  }
  const auto measured = [&](BenchVerb verb) { return std::ranges::find(options.verbs, verb) != options.verbs.end(); };
  if (ranks < 2 && (measured(BenchVerb::pingpong) || measured(BenchVerb::sendrecv))) {
    refuse("pingpong and sendrecv need two ranks: leave them out of --ops, or start more ranks");
  }
  const bool averages = std::ranges::find(options.ops, ReduceOp::avg) != options.ops.end();
  if (averages && std::ranges::any_of(options.types, is_integral)) {
    refuse("--reduce-op avg is for floating point types: leave the integers out of --datatype, or avg out of the ops");
  }
  if (options.device != "cpu" && options.device != "cuda") {
    refuse(fmt::format("--device is '{}'{}: expected cpu or cuda", options.device,
                       did_you_mean(options.device, {"cpu", "cuda"})));
  }
  for (const std::string& name : options.backends) {
    if (name.empty()) refuse("--backends has an empty name: expected names with single commas between");
    if (std::ranges::count(options.backends, name) > 1) refuse(fmt::format("--backends names {} twice", name));
  }
}

}  // namespace phalanx::measure
