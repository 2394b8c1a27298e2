#include "cli/front/checkpoint_command.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "cli/front/worker_program.h"
#include "cli/merge_arguments.h"
#include "cli/parse_options.h"
#include "phalanx/base/dtype_names.h"
#include "phalanx/base/error.h"
#include "phalanx/base/folder_lock.h"
#include "phalanx/base/human.h"
#include "phalanx/base/log.h"
#include "phalanx/base/parse_text.h"
#include "phalanx/base/progress.h"
#include "phalanx/checkpoint/files/checkpoint_list.h"
#include "phalanx/checkpoint/files/compare_states.h"
#include "phalanx/checkpoint/files/hf_model.h"
#include "phalanx/checkpoint/files/mismatch.h"
#include "phalanx/checkpoint/files/rewrite.h"
#include "phalanx/checkpoint/files/saved_state.h"
#include "phalanx/checkpoint/files/verify_step.h"

namespace phalanx::cli {
namespace {

constexpr std::string_view kCheckpointHelp =
    R"(usage: phalanx checkpoint inspect DIR
       phalanx checkpoint verify DIR [--quiet]
       phalanx checkpoint diff A B [--quiet]
       phalanx checkpoint consolidate DIR OUT [--all | --hf [--assets DIR]] [--dtype TYPE]
           [--max-file-size SIZE] [--quiet]
       phalanx checkpoint reshard DIR OUT --ranks N [--quiet]
       phalanx checkpoint merge DIR OUT [--adapter DIR] [--dtype TYPE] [--max-file-size SIZE] [--quiet]

Looks into checkpoints, checks, compares and rewrites them, whatever number of ranks has saved them in whatever layout.
DIR, A and B: a run's folder or its checkpoint folder (the newest complete step), or one of the step-N directories.

  inspect       step, integers, metadata, files, and every tensor with its global shape and the boxes it lies in
  verify        reads every byte and compares it with its hash; of a folder, of all its steps. Status 1, with the
                damaged files and the tensors in them, if something is wrong
  diff          tensors and integers that differ, and by how much. Status 0 if all is the same to the bit, else 1
  consolidate   writes the model's weights as plain safetensors, whole tensors that any reader takes. OUT is a new file
                x.safetensors, or a new directory for model.safetensors
  reshard       writes the same state as N files with even parts of the rows, to a step directory in the folder OUT.
                Not needed for loading: any number of ranks loads what any other has saved
  merge         adds an adapter to the weights of its base, and writes a Hugging Face directory OUT. DIR is the base, a
                Hugging Face directory or a run's, with --adapter; or the run that trained the adapter (docs/lora.md)

Nothing is written into the folder of a run that lives: consolidate, reshard and merge are refused with its host and
process.

  --all                 consolidate every tensor under its whole name, the optimizer's too
  --hf                  under the names of Hugging Face's LlamaForCausalLM, with config.json, generation_config.json and
                        the tokenizer's files, in the new directory OUT
  --assets DIR          where the tokenizer's files are (default: where the run had them)
  --allow-tokenizer-mismatch  write another tokenizer than the checkpoint names, with a warning
  --dtype TYPE          convert floating-point tensors to bf16, f16, f32 or f64
  --max-file-size SIZE  several files of at most so many bytes (5G, 500M), and model.safetensors.index.json
  --adapter DIR         merge: the adapter, a folder as PEFT saves it
  --allow-base-mismatch  merge: although it was trained on other weights than those of DIR
  --quiet, -q           no progress

  phalanx checkpoint verify outputs/checkpoint
  phalanx checkpoint consolidate outputs/checkpoint weights.safetensors --dtype bf16
  phalanx checkpoint consolidate outputs/checkpoint llama-hf --hf
  phalanx checkpoint merge Llama-3.2-1B merged --adapter outputs/adapter --dtype bf16
)";

struct CheckpointArguments {
  std::vector<std::string> paths;
  bool quiet = false;
  bool all = false;
  bool hf = false;
  bool allow_tokenizer_mismatch = false;
  std::string assets;
  std::string dtype;
  std::string max_file_size;
  std::optional<std::int64_t> ranks;
};

struct Subcommand {
  std::string_view name;
  std::vector<std::string_view> paths;
  int (*run)(const CheckpointArguments&);
};

void require_paths(const Subcommand& subcommand, const std::vector<std::string>& paths) {
  if (paths.size() > subcommand.paths.size())
    throw UsageError(fmt::format("unexpected argument '{}' of `phalanx checkpoint {}`", paths[subcommand.paths.size()],
                                 subcommand.name));
  if (paths.size() < subcommand.paths.size())
    throw UsageError(
        fmt::format("`phalanx checkpoint {}` needs {}", subcommand.name, fmt::join(subcommand.paths, " and ")));
}

/// Adds the options of the subcommand to its app.
void add_checkpoint_options(CLI::App& app, CheckpointArguments& parsed) {
  app.add_option("paths", parsed.paths);
  if (app.get_name() != "inspect") app.add_flag("--quiet,-q", parsed.quiet);
  if (app.get_name() == "consolidate") {
    app.add_flag("--all", parsed.all);
    app.add_flag("--hf", parsed.hf);
    app.add_option("--assets", parsed.assets);
    app.add_flag("--allow-tokenizer-mismatch", parsed.allow_tokenizer_mismatch);
    app.add_option("--dtype", parsed.dtype);
    app.add_option("--max-file-size", parsed.max_file_size);
  }
  if (app.get_name() == "reshard") app.add_option("--ranks", parsed.ranks);
}

ProgressBar progress_of(const std::string& title, std::uint64_t total, const CheckpointArguments& arguments,
                        ProgressUnit unit = ProgressUnit::bytes) {
  return {title, total, {.unit = unit, .style = arguments.quiet ? ProgressStyle::silent : ProgressStyle::automatic}};
}

std::string count_of(std::size_t count, std::string_view noun) {
  const bool ends_in_x = noun.ends_with('x');  // boxes
  return fmt::format("{} {}{}", with_commas(static_cast<std::int64_t>(count)), noun,
                     count == 1  ? ""
                     : ends_in_x ? "es"
                                 : "s");
}

std::size_t files_of(const SavedTensor& tensor) {
  std::vector<std::size_t> files;
  for (const auto& box : tensor.boxes) files.push_back(box.file);
  std::ranges::sort(files);
  return static_cast<std::size_t>(std::unique(files.begin(), files.end()) - files.begin());
}

std::string indented(const std::string& text, std::string_view spaces) {
  std::string result;
  for (const char c : text) {
    result += c;
    if (c == '\n') result += spaces;
  }
  return result;
}

void print_tensors(const SavedState& saved) {
  std::size_t name_width = 4, shape_width = 5;
  for (const auto& tensor : saved.tensors()) {
    name_width = std::max(name_width, tensor.name.size());
    shape_width = std::max(shape_width, safetensors::format_shape(tensor.shape).size());
  }
  fmt::print("\n{:<{}}  {:<7}  {:<{}}  {:>10}  {:>5}  {:>5}\n", "tensor", name_width, "dtype", "shape", shape_width,
             "size", "boxes", "files");
  for (const auto& tensor : saved.tensors())
    fmt::print("{:<{}}  {:<7}  {:<{}}  {:>10}  {:>5}  {:>5}\n", tensor.name, name_width,
               safetensors::name_of(tensor.dtype), safetensors::format_shape(tensor.shape), shape_width,
               human_bytes(tensor.bytes()), tensor.boxes.size(), files_of(tensor));
}

int inspect(const CheckpointArguments& arguments) {
  const SavedState saved(resolve_checkpoint(arguments.paths[0]));
  const auto& manifest = saved.manifest();
  std::uint64_t bytes = 0;
  std::size_t name_width = 0;
  for (const auto& file : manifest.files) {
    bytes += file.size;
    name_width = std::max(name_width, file.name.size());
  }
  double elements = 0;
  for (const auto& tensor : saved.tensors()) elements += static_cast<double>(tensor.whole().numel());
  fmt::print("{}\n", saved.folder().string());
  fmt::print("step      {}\n", manifest.step);
  fmt::print("state     {}, {} elements, {} in {}\n", count_of(saved.tensors().size(), "tensor"), human_count(elements),
             human_bytes(bytes), count_of(manifest.files.size(), "file"));
  const char* title = "integers";
  for (const auto& [name, value] : manifest.integers) {
    fmt::print("{:<8}  {} = {}\n", title, name, value);
    title = "";
  }
  const auto metadata = nlohmann::json::parse(manifest.metadata);
  fmt::print("metadata  {}\n", indented(metadata.empty() ? "none" : metadata.dump(2), "          "));
  title = "files";
  for (std::size_t i = 0; i < manifest.files.size(); ++i) {
    const auto& file = manifest.files[i];
    fmt::print("{:<8}  {:<{}}  {:>10}  {}\n", title, file.name, name_width, human_bytes(file.size),
               count_of(saved.files()[i].header().tensors.size(), "box"));
    title = "";
  }
  print_tensors(saved);
  return 0;
}

/// The given step directory, or all step directories of a folder, newest first.
std::vector<std::filesystem::path> steps_to_verify(const std::filesystem::path& path) {
  std::error_code error;
  const auto name = (path.has_filename() ? path : path.parent_path()).filename().string();
  if (!std::filesystem::is_directory(path, error)) return {resolve_checkpoint(path)};  // throws
  if (std::filesystem::exists(path / kManifestName, error) || name.starts_with("step-")) return {path};
  const auto list = list_checkpoints(checkpoint_folder(path));
  std::vector<FoundCheckpoint> steps = list.complete;
  steps.insert(steps.end(), list.damaged.begin(), list.damaged.end());
  std::ranges::stable_sort(steps, std::ranges::greater(), &FoundCheckpoint::step);
  if (steps.empty()) return {resolve_checkpoint(path)};  // throws: there is none
  std::vector<std::filesystem::path> paths;
  paths.reserve(steps.size());
  for (const auto& step : steps) paths.push_back(step.path);
  return paths;
}

bool verify_and_tell(const std::filesystem::path& step, const CheckpointArguments& arguments) {
  try {
    const auto bytes = bytes_to_verify(step);
    auto bar = progress_of("verifying " + step.filename().string(), bytes, arguments);
    const auto found = verify_step(step, [&](std::uint64_t done) { bar.advance(done); });
    bar.finish();
    for (const auto& damage : found)
      fmt::print("{}{}{}\n", damage.file.empty() ? "" : (step / damage.file).string(), damage.file.empty() ? "" : ": ",
                 damage.reason);
    if (found.empty()) {
      const SavedState saved(step);
      fmt::print("{}: sound: {} in {}, {}\n", step.string(), human_bytes(bytes),
                 count_of(saved.manifest().files.size(), "file"), count_of(saved.tensors().size(), "tensor"));
    } else {
      fmt::print("{}: DAMAGED in {}\n", step.string(), count_of(found.size(), "place"));
    }
    return found.empty();
  } catch (const DamagedError& error) {
    fmt::print("{}\n{}: DAMAGED: its manifest cannot be used\n", error.what(), step.string());
    return false;
  }
}

int verify(const CheckpointArguments& arguments) {
  bool sound = true;
  for (const auto& step : steps_to_verify(arguments.paths[0])) sound = verify_and_tell(step, arguments) && sound;
  return sound ? 0 : 1;
}

std::string type_of(const SavedTensor& tensor) {
  return describe_type({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
}

void print_difference(const TensorDifference& difference) {
  const auto name = safetensors::quote_name(difference.a->name);
  if (!difference.same_shape()) {
    fmt::print("{}: a is {}, b is {}\n", name, type_of(*difference.a), type_of(*difference.b));
    return;
  }
  std::string line = name + ": ";
  if (!difference.same_dtype())
    line += fmt::format("a is {}, b is {}; ", safetensors::name_of(difference.a->dtype),
                        safetensors::name_of(difference.b->dtype));
  if (difference.elements == 0) {
    line += "the values are the same";
  } else {
    line += fmt::format("{} of {} elements differ, max |a - b| = {:.6g} at {}", with_commas(difference.elements),
                        with_commas(difference.a->whole().numel()), difference.largest,
                        safetensors::format_shape(difference.largest_at));
  }
  fmt::print("{}\n", line);
}

int diff(const CheckpointArguments& arguments) {
  SavedState a(resolve_checkpoint(arguments.paths[0])), b(resolve_checkpoint(arguments.paths[1]));
  std::uint64_t elements = 0;
  for (const auto& tensor : a.tensors()) elements += static_cast<std::uint64_t>(tensor.whole().numel());
  auto bar = progress_of("comparing", elements, arguments, ProgressUnit::items);
  const auto difference = compare_states(a, b, [&](std::uint64_t done) { bar.advance(done); });
  bar.finish();
  fmt::print("a: {}\nb: {}\n", a.folder().string(), b.folder().string());
  if (difference.is_none()) {
    fmt::print("the same: {}, {}\n", count_of(difference.compared, "tensor"),
               count_of(a.manifest().integers.size(), "integer"));
    return 0;
  }
  for (const auto& line : difference.integers) fmt::print("{}\n", line);
  for (const auto* tensor : difference.only_in_a)
    fmt::print("only in a: {} {}\n", safetensors::quote_name(tensor->name), type_of(*tensor));
  for (const auto* tensor : difference.only_in_b)
    fmt::print("only in b: {} {}\n", safetensors::quote_name(tensor->name), type_of(*tensor));
  for (const auto& tensor : difference.tensors) print_difference(tensor);
  fmt::print("{} in both: {} the same, {} not; {} only in a, {} only in b\n", count_of(difference.compared, "tensor"),
             difference.compared - difference.tensors.size(), difference.tensors.size(), difference.only_in_a.size(),
             difference.only_in_b.size());
  return 1;
}

safetensors::Dtype parse_dtype(const std::string& text) {
  using safetensors::Dtype;
  static const std::map<std::string, Dtype> known = {
      {"bfloat16", Dtype::bf16}, {"float16", Dtype::f16}, {"float32", Dtype::f32}, {"float64", Dtype::f64}};
  const auto found = known.find(canonical_dtype(text));
  if (found == known.end()) throw UsageError(fmt::format("--dtype is '{}': expected bf16, f16, f32 or f64", text));
  return found->second;
}

void tell_written(const WrittenFiles& written, const std::string& where) {
  fmt::print("{}: {}, {} in {}\n", where, count_of(written.tensors, "tensor"), human_bytes(written.bytes),
             count_of(written.files.size(), "file"));
}

/// The locks to hold while OUT is written.
OwnerLocks locks_of_out(const std::string& out) {
  OwnerLocks locks({out}, {.advice = "choose another OUT"});
  for (const std::string& line : locks.warnings()) log::warn(line);
  return locks;
}

int consolidate_command(const CheckpointArguments& arguments) {
  ConsolidateOptions options{.all = arguments.all};
  if (!arguments.dtype.empty()) options.dtype = parse_dtype(arguments.dtype);
  if (!arguments.max_file_size.empty()) {
    const auto size = parse_size("--max-file-size", arguments.max_file_size);
    if (size < 1) throw UsageError("--max-file-size is 0: expected 1 or more bytes");
    options.max_file_bytes = static_cast<std::uint64_t>(size);
  }
  if (arguments.all && arguments.hf)
    throw UsageError("--all and --hf: a Hugging Face model is the weights alone; give one of them");
  if (!arguments.assets.empty() && !arguments.hf) throw UsageError("--assets DIR is a part of --hf");
  if (arguments.allow_tokenizer_mismatch && !arguments.hf) {
    throw UsageError("--allow-tokenizer-mismatch is a part of --hf");
  }
  if (!arguments.assets.empty()) require_assets(arguments.assets);
  options.allow_tokenizer_mismatch = arguments.allow_tokenizer_mismatch;
  const OwnerLocks locks = locks_of_out(arguments.paths[1]);
  SavedState saved(resolve_checkpoint(arguments.paths[0]));
  auto bar = progress_of("writing", consolidated_bytes(saved, options), arguments);
  options.progress = [&](std::uint64_t done) { bar.advance(done); };
  const auto written = arguments.hf ? consolidate_for_hf(saved, arguments.paths[1], options, arguments.assets)
                                    : consolidate(saved, arguments.paths[1], options);
  bar.finish();
  tell_written(written, arguments.paths[1]);
  return 0;
}

int reshard_command(const CheckpointArguments& arguments) {
  constexpr std::int64_t kMaxFiles = 99'999;  // five digits in a file's name
  if (!arguments.ranks) throw UsageError("--ranks N is missing: the number of files to write");
  require_range("--ranks", *arguments.ranks, 1, kMaxFiles);
  const OwnerLocks locks = locks_of_out(arguments.paths[1]);
  SavedState saved(resolve_checkpoint(arguments.paths[0]));
  std::uint64_t bytes = 0;
  for (const auto& tensor : saved.tensors()) bytes += tensor.bytes();
  auto bar = progress_of("writing", bytes, arguments);
  const auto written =
      reshard(saved, arguments.paths[1],
              {.files = static_cast<int>(*arguments.ranks), .progress = [&](std::uint64_t n) { bar.advance(n); }});
  bar.finish();
  tell_written(written, written.files[0].parent_path().string());
  return 0;
}

const std::vector<Subcommand>& subcommands() {
  static const std::vector<Subcommand> all = {
      {.name = "inspect", .paths = {"DIR"}, .run = inspect},
      {.name = "verify", .paths = {"DIR"}, .run = verify},
      {.name = "diff", .paths = {"A", "B"}, .run = diff},
      {.name = "consolidate", .paths = {"DIR", "OUT"}, .run = consolidate_command},
      {.name = "reshard", .paths = {"DIR", "OUT"}, .run = reshard_command},
  };
  return all;
}

}  // namespace

int checkpoint_command(const Arguments& arguments) {
  const bool help = std::ranges::any_of(arguments, [](const auto& word) { return word == "--help" || word == "-h"; });
  if (arguments.empty() || help) {
    fmt::print(help ? stdout : stderr, "{}", kCheckpointHelp);
    return help ? 0 : 2;
  }
  if (arguments.front() == "merge") {
    const Arguments rest(arguments.begin() + 1, arguments.end());
    parse_merge_arguments(rest);
    become_worker("merge", rest);
  }
  CheckpointArguments parsed;
  CLI::App app;
  for (const Subcommand& subcommand : subcommands())
    add_checkpoint_options(*app.add_subcommand(std::string(subcommand.name)), parsed);
  app.add_subcommand("merge");  // known, and taken above
  Arguments words = arguments;
  CLI::App& chosen = take_subcommand(app, words);
  parse_options(chosen, words);
  const Subcommand& subcommand = *std::ranges::find(subcommands(), chosen.get_name(), &Subcommand::name);
  require_paths(subcommand, parsed.paths);
  return subcommand.run(parsed);
}

}  // namespace phalanx::cli
