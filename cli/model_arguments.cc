#include "cli/model_arguments.h"

#include "cli/parse_options.h"
#include "phalanx/base/error.h"

namespace phalanx::cli {

void add_model_options(CLI::App& app, ModelArguments& parsed) {
  app.add_option("--checkpoint", parsed.checkpoint);
  app.add_flag("--allow-model-mismatch", parsed.allow_model_mismatch);
  app.add_option("--adapter", parsed.adapter);
  app.add_flag("--allow-base-mismatch", parsed.allow_base_mismatch);
  app.add_option("--tokenizer", parsed.tokenizer);
  app.add_flag("--allow-tokenizer-mismatch", parsed.allow_tokenizer_mismatch);
  app.add_option("--batch-size", parsed.batch_size);
  add_ranks_option(app, parsed.ranks);
  app.add_option("--tp", parsed.tp);
  app.add_option("--pp", parsed.pp);
  app.add_option("--dtype", parsed.dtype);
  app.add_option("--device", parsed.device);
  app.add_option("--backend", parsed.backend);
  app.add_flag("--quiet,-q", parsed.quiet);
}

void require_adapter_for_base(const ModelArguments& parsed) {
  if (parsed.allow_base_mismatch && parsed.adapter.empty()) {
    throw UsageError("--allow-base-mismatch is a part of --adapter DIR");
  }
}

void check_model_options(ModelArguments& parsed) {
  require_adapter_for_base(parsed);
  parsed.dtype = dtype_option("--dtype", parsed.dtype);
  check_backend_option(parsed.backend);
  require_range("--batch-size", parsed.batch_size, 1);
  require_range("--tp", parsed.tp, 1);
  require_range("--pp", parsed.pp, 1);
  if (parsed.checkpoint.empty()) throw UsageError("--checkpoint DIR is missing: a run's checkpoint folder");
}

}  // namespace phalanx::cli
