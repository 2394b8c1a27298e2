#include "cli/merge_arguments.h"

#include <fmt/format.h>

#include <vector>

#include "cli/parse_options.h"
#include "phalanx/base/error.h"
#include "phalanx/base/parse_text.h"

namespace phalanx::cli {

MergeArguments parse_merge_arguments(const Arguments& arguments) {
  MergeArguments parsed;
  std::vector<std::string> paths;
  std::string max_file_size;
  CLI::App app;
  app.add_option("paths", paths);
  app.add_option("--adapter", parsed.adapter);
  app.add_flag("--allow-base-mismatch", parsed.allow_base_mismatch);
  app.add_option("--dtype", parsed.dtype);
  app.add_option("--max-file-size", max_file_size);
  app.add_flag("--quiet,-q", parsed.quiet);
  parse_options(app, arguments);
  if (paths.size() > 2)
    throw UsageError(fmt::format("unexpected argument '{}' of `phalanx checkpoint merge`", paths[2]));
  if (paths.size() < 2) throw UsageError("`phalanx checkpoint merge` needs DIR and OUT");
  parsed.model = paths[0];
  parsed.out = paths[1];
  parsed.dtype = dtype_option("--dtype", parsed.dtype);
  if (parsed.allow_base_mismatch && parsed.adapter.empty()) {
    throw UsageError("--allow-base-mismatch is a part of --adapter DIR");
  }
  if (max_file_size.empty()) return parsed;
  const auto size = parse_size("--max-file-size", max_file_size);
  if (size < 1) throw UsageError("--max-file-size is 0: expected 1 or more bytes");
  parsed.max_file_bytes = static_cast<std::uint64_t>(size);
  return parsed;
}

}  // namespace phalanx::cli
