#include "recipes/recipe.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <new>
#include <optional>

#include "phalanx/launch/spawn.h"
#include "phalanx/launch/supervisor/worker_report.h"
#include "recipes/join_ranks.h"

extern const char* const kRecipeHelp;  // the first comment of the recipe's source; see embed_help.cmake

namespace recipe {
namespace {

int report(const std::string& program, const phalanx::Error& error) {
  if (!phalanx::report_error_to_launcher(error)) fmt::print(stderr, "{}: {}\n", program, error.what());
  return error.exit_status();
}

/// Of what an option counts. Larger numbers would not fit together: their sums and products are 64-bit numbers.
constexpr std::int64_t kMost = 1'000'000'000'000;

phalanx::Error first_line(const std::string& text) { return phalanx::Error(text.substr(0, text.find('\n'))); }

}  // namespace

Program::Program() : CLI::App(kRecipeHelp) {
  option_defaults()->always_capture_default();
  add_option("--device", init_.device, "where tensors are: auto, cpu or cuda");
  add_option("--spawn", spawned_,
             "start so many ranks on this machine, one world after the other: 2, or 1,2,4; auto: as many as devices")
      ->delimiter(',')
      ->transform([](const std::string& ranks) {
        return ranks == "auto" ? std::to_string(phalanx::ranks_for_devices()) : ranks;
      })
      ->check(CLI::Range(1, 1024))
      ->always_capture_default(false);
}

void Program::add_rendezvous_options() {
  add_option("--init-method,--method", init_.method, "env://, tcp://HOST:PORT or file:///PATH");
  add_option("--rank", init_.rank, "of this process, for tcp:// and file://")->check(at_least(0));
  add_option("--world-size", init_.world_size, "how many ranks, likewise")->check(at_least(1));
  add_option("--backend", init_.backend, "auto, shm, gloo, mpi, nccl, ...");
}

const bool& Program::add_per_rank_flag() {
  add_flag("--per-rank", per_rank_, "also print what each rank does");
  return per_rank_;
}

int Program::run(int argc, char** argv, const std::function<bool(const phalanx::ProcessContext&)>& body) {
  const std::string program = std::filesystem::path(argv[0]).filename().string();
  try {
    parse(argc, argv);
    for (std::size_t world = 0; world < spawned_.size(); ++world) {
      // Here the result is the ranks' exit status. In the ranks, which run this same main(), there is none.
      const std::optional<int> status = phalanx::spawn_local_ranks(spawned_[world], argc, argv);
      if (!status) break;
      if (*status != 0 || world + 1 == spawned_.size()) return *status;
    }
    return body(join_ranks(init_)) ? 0 : 1;
  } catch (const CLI::Success& help) {
    return exit(help);
  } catch (const CLI::ParseError& error) {
    return report(program, phalanx::UsageError(fmt::format("{}; --help lists the arguments", error.what())));
  } catch (const phalanx::Error& error) {
    return report(program, error);
  } catch (const c10::Error& error) {
    return report(program, first_line(error.what_without_backtrace()));
  } catch (const std::bad_alloc&) {
    return report(program, phalanx::Error("there is not enough memory for what the arguments ask for"));
  } catch (const std::exception& error) {
    return report(program, first_line(error.what()));
  }
}

CLI::Validator positive() {
  const auto check = [](const std::string& text) -> std::string {
    double value = 0;
    if (CLI::detail::lexical_cast(text, value) && std::isfinite(value) && value > 0) return "";
    return text + ": expected a number above 0";
  };
  return {check, "above 0"};
}

CLI::Validator at_least(std::int64_t smallest) {
  const auto check = [smallest](const std::string& text) -> std::string {
    std::int64_t value = 0;
    if (CLI::detail::lexical_cast(text, value) && value >= smallest && value <= kMost) return "";
    return fmt::format("{}: expected a whole number of {} or more, {} at most", text, smallest, kMost);
  };
  return {check, fmt::format("{} or more", smallest)};
}

void print_by_rank(phalanx::Communicator& world, const std::string& text) {
  const std::vector<std::string> texts = world.gather_bytes(text);
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    for (std::size_t begin = 0; begin < texts[rank].size();) {
      const std::size_t end = std::min(texts[rank].find('\n', begin), texts[rank].size());
      fmt::print("rank {}: {}\n", rank, texts[rank].substr(begin, end - begin));
      begin = end + 1;
    }
  }
  std::fflush(stdout);
}

void print_by_rank(phalanx::Communicator& world, const std::string& name, const std::vector<at::Tensor>& activations) {
  std::string text;
  for (std::size_t i = 0; i < activations.size(); ++i) {
    text += fmt::format("{}, layer {}: {}\n", name, i, summary(activations[i]));
  }
  print_by_rank(world, text);
}

std::string summary(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().flatten().slice(0, 0, 3).to(at::kDouble).cpu();
  std::string text = fmt::format("{} [", fmt::join(tensor.sizes(), " x "));
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    text += fmt::format("{}{:.3f}", i == 0 ? "" : " ", values[i].item<double>());
  }
  return text + (tensor.numel() > values.numel() ? " ...]" : "]");
}

std::int64_t share_of(std::int64_t count, int ranks, std::string_view what) {
  if (count % ranks == 0) return count / ranks;
  throw phalanx::UsageError(
      fmt::format("{} {} make no equal shares for {} ranks: expected a number of ranks that divides {}", count, what,
                  ranks, count));
}

}  // namespace recipe
