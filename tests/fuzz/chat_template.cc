// A chat template, rendered. A zero byte ends it: what follows is the context, as JSON.
#include <algorithm>
#include <optional>

#include "phalanx/data/jinja/json_value.h"
#include "phalanx/data/jinja/template.h"
#include "tests/fuzz/fuzz.h"

using namespace phalanx;

namespace {

constexpr std::string_view kContext =
    R"({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": " é "}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1.5}}}]}],
        "tools": [{"function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "number"}}}}}],
        "bos_token": "<s>", "add_generation_prompt": true, "documents": null})";

jinja::Context context_of(std::string_view json) {
  const jinja::Value value = jinja::read_json(json, fuzz::kFile);
  jinja::Context context;
  if (!value.is_dict()) return context;
  for (const auto& [key, item] : value.dict().entries()) context.emplace_back(key.text(), item);
  return context;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input = fuzz::text_of(data, size);
  const std::size_t end = std::min(input.find('\0'), input.size());
  return fuzz::parse([&] {
    const auto chat = jinja::Template::parse(input.substr(0, end), fuzz::kFile);
    const auto context = context_of(end < input.size() ? input.substr(end + 1) : kContext);
    const jinja::RenderOptions options{.limits = {.steps = 200'000, .bytes = 16 << 20, .output_bytes = 1 << 20},
                                       .clock = [] { return std::tm{}; }};
    const auto rendered = chat.render(context, options);
    fuzz::require(rendered.text.size() <= 1 << 20, "the output is bounded");
    for (const auto& span : rendered.generated) {
      fuzz::require(span.begin <= span.end && span.end <= rendered.text.size(), "spans lie in the text");
    }
  });
}
