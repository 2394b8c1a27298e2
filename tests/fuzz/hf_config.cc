// config.json of a Hugging Face model.
#include "phalanx/models/config/hf_config.h"
#include "tests/fuzz/fuzz.h"

using namespace phalanx;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(fuzz::text_of(data, size));
  fuzz::parse([&] { models::hf_end_tokens(text, fuzz::kFile); });
  return fuzz::parse([&] {
    const auto config = models::llama_config_from_hf(text, fuzz::kFile);
    fuzz::require(config.parameter_count() > 0, "a model has parameters");
    const std::string written = models::llama_hf_config(config, "float32");
    const auto again = models::llama_config_from_hf(written, fuzz::kFile);
    fuzz::require(models::llama_hf_config(again, "float32") == written, "what is written is read");
  });
}
