// Measures the speed of the tokenizer on one core: training, encoding, decoding. Prints one line of JSON.
// tokenizer_speed.py compares it with the `tokenizers` Python package, in turns.
//
//   tokenizer_speed TEXT --train 4096 tokenizer.json    train on TEXT, save, print the seconds
//   tokenizer_speed TEXT --encode tokenizer.json IDS    encode (as one document) and decode; ids to IDS as raw int32
//   tokenizer_speed STRINGS --strings tokenizer.json OUT  no timing: for compare_tokenizers.py, of a JSON list of
//                                                         strings the ids, with and without special tokens, and the
//                                                         text decoded
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/base/file.h"
#include "phalanx/data/tokenizer/bpe_tokenizer.h"
#include "phalanx/data/tokenizer/bpe_trainer.h"

namespace {

/// CPU time of this process, so that other programs on the node do not count.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void encode_strings(const std::string& strings, const std::string& tokenizer_path, const std::string& out) {
  const auto tokenizer = phalanx::data::BpeTokenizer::load(tokenizer_path);
  nlohmann::json results = nlohmann::json::array();
  for (const auto& text : nlohmann::json::parse(phalanx::read_file(strings)).get<std::vector<std::string>>()) {
    const auto plain = tokenizer.encode(text);
    results.push_back({{"ids", tokenizer.encode(text, {.add_special_tokens = true})},
                       {"plain", plain},
                       {"text", tokenizer.decode(plain)}});
  }
  phalanx::write_file(out, results.dump());
}

int run(const std::vector<std::string>& arguments) {
  const std::string mode = arguments.size() == 4 ? arguments[1] : "";
  if (mode != "--train" && mode != "--encode" && mode != "--strings") {
    fmt::print(stderr,
               "usage: tokenizer_speed TEXT --train VOCAB_SIZE TOKENIZER | TEXT --encode TOKENIZER IDS | "
               "STRINGS --strings TOKENIZER OUT\n");
    return 2;
  }
  if (mode == "--strings") {
    encode_strings(arguments[0], arguments[2], arguments[3]);
    return 0;
  }
  const std::string text = phalanx::read_file(arguments[0]);
  const auto megabytes = static_cast<double>(text.size()) / 1e6;
  if (mode == "--train") {
    const double start = cpu_seconds();
    phalanx::data::BpeTrainer trainer({.vocab_size = std::atoll(arguments[2].c_str())});
    trainer.add(text);
    const double read = cpu_seconds();
    const auto tokenizer = trainer.train();
    const double end = cpu_seconds();
    tokenizer.save(arguments[3]);
    fmt::print("{{\"train_s\": {:.3f}, \"count_s\": {:.3f}, \"merge_s\": {:.3f}}}\n", end - start, read - start,
               end - read);
    return 0;
  }
  double start = cpu_seconds();
  const auto tokenizer = phalanx::data::BpeTokenizer::load(arguments[2]);
  const double load = cpu_seconds() - start;
  start = cpu_seconds();
  const auto ids = tokenizer.encode(text);
  const double encode = cpu_seconds() - start;
  start = cpu_seconds();
  const std::string back = tokenizer.decode(ids);
  const double decode = cpu_seconds() - start;
  phalanx::write_file(arguments[3], {reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(ids[0])});
  fmt::print(
      "{{\"encode_mb_s\": {:.2f}, \"decode_mb_s\": {:.2f}, \"load_s\": {:.4f}, \"tokens\": {}, \"round_trip\": {}}}\n",
      megabytes / encode, megabytes / decode, load, ids.size(), back == text);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    fmt::print(stderr, "tokenizer_speed: {}\n", error.what());
    return 1;
  }
}
