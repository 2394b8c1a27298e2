#include "phalanx/comm/byte_objects.h"

#include <numeric>

namespace phalanx {
namespace {

std::size_t sum_of(const std::vector<std::int64_t>& lengths) {
  return static_cast<std::size_t>(std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}));
}

std::vector<std::string> cut(const std::string& all, const std::vector<std::int64_t>& lengths) {
  std::vector<std::string> values;
  std::size_t at = 0;
  for (const std::int64_t length : lengths) {
    values.push_back(all.substr(at, static_cast<std::size_t>(length)));
    at += static_cast<std::size_t>(length);
  }
  return values;
}

/// A collective on counts, as many as given.
OperationDescription on_lengths(Verb verb, int root, const std::int64_t* input, std::size_t inputs,
                                std::int64_t* output, std::size_t outputs) {
  OperationDescription d;
  d.verb = verb;
  d.dtype = DataType::i64;
  d.root = root;
  d.input = input;
  d.input_count = static_cast<std::int64_t>(inputs);
  d.output = output;
  d.output_count = static_cast<std::int64_t>(outputs);
  return d;
}

OperationDescription on_bytes(Verb verb, const std::string& input, std::string& output) {
  OperationDescription d;
  d.verb = verb;
  d.dtype = DataType::u8;
  d.input = input.data();
  d.input_count = static_cast<std::int64_t>(input.size());
  d.output = output.data();
  d.output_count = static_cast<std::int64_t>(output.size());
  return d;
}

}  // namespace

std::vector<std::string> ByteObjects::all_gather(const std::string& value) {
  std::vector<std::int64_t> lengths(size_);
  const auto mine = static_cast<std::int64_t>(value.size());
  run_(on_lengths(Verb::all_gather, 0, &mine, 1, lengths.data(), size_));
  std::string all(sum_of(lengths), '\0');
  OperationDescription data = on_bytes(Verb::all_gather, value, all);
  data.counts = lengths;
  run_(std::move(data));
  return cut(all, lengths);
}

std::string ByteObjects::broadcast(std::string value, int root) {
  auto length = static_cast<std::int64_t>(value.size());
  run_(on_lengths(Verb::broadcast, root, nullptr, 0, &length, 1));
  value.resize(static_cast<std::size_t>(length));
  OperationDescription data = on_bytes(Verb::broadcast, "", value);
  data.input = nullptr;
  data.root = root;
  run_(std::move(data));
  return value;
}

// Uneven gather and scatter of bytes are all_to_all with most counts zero.
std::vector<std::string> ByteObjects::gather(const std::string& value, int root) {
  const bool is_root = rank_ == root;
  std::vector<std::int64_t> incoming(size_, 0), outgoing(size_, 0);
  const auto mine = static_cast<std::int64_t>(value.size());
  run_(on_lengths(Verb::gather, root, &mine, 1, is_root ? incoming.data() : nullptr, is_root ? size_ : 0));
  outgoing[static_cast<std::size_t>(root)] = mine;
  auto values = exchange(value, std::move(outgoing), incoming);
  return is_root ? values : std::vector<std::string>();
}

std::string ByteObjects::scatter(const std::vector<std::string>& values, int root) {
  const bool is_root = rank_ == root;
  std::vector<std::int64_t> incoming(size_, 0), outgoing(size_, 0);
  std::string all;
  for (std::size_t r = 0; is_root && r < size_; ++r) {
    outgoing[r] = static_cast<std::int64_t>(values[r].size());
    all += values[r];
  }
  std::int64_t mine = 0;
  run_(on_lengths(Verb::scatter, root, is_root ? outgoing.data() : nullptr, is_root ? size_ : 0, &mine, 1));
  incoming[static_cast<std::size_t>(root)] = mine;
  return exchange(all, std::move(outgoing), incoming).at(static_cast<std::size_t>(root));
}

std::vector<std::string> ByteObjects::exchange(const std::string& input, std::vector<std::int64_t> input_counts,
                                               const std::vector<std::int64_t>& output_counts) {
  std::string all(sum_of(output_counts), '\0');
  OperationDescription data = on_bytes(Verb::all_to_all, input, all);
  data.input_counts = std::move(input_counts);
  data.output_counts = output_counts;
  run_(std::move(data));
  return cut(all, output_counts);
}

}  // namespace phalanx
