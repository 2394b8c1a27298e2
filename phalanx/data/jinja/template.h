// Template: a Jinja template, as chat templates are written, and as transformers renders them: trim_blocks,
// lstrip_blocks, {% break %} and {% continue %}, `tojson` without HTML escapes, raise_exception(), strftime_now(), and
// {% generation %} blocks, which mark what the assistant says.
//
// A template is a file from a stranger. It sees its context and nothing else: no files, no environment, no code. Steps,
// memory, depth and output are bounded (Limits); whatever goes wrong is a DataError that names the template, the line
// and the reason.
//
// README.md in this folder lists what is supported. A template is immutable after parsing; render() may be called from
// any number of threads.
//
//   const Template greeting =
//       Template::parse("{% for m in messages %}{{ m.content | trim }}\n{% endfor %}", "greeting");
//   const Rendered hello = greeting.render({{"messages", read_json(R"([{"content": " Hi "}])", "messages")}});
//   hello.text;                                                                                     // "Hi\n"
#pragma once

#include <cstddef>
#include <cstdint>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "phalanx/data/jinja/value.h"

namespace phalanx::jinja {

struct SyntaxTree;

struct Limits {
  std::int64_t steps = 20'000'000;       // expressions and statements that are evaluated
  std::int64_t bytes = 512 << 20;        // of all texts and lists that are made or searched
  std::int64_t output_bytes = 64 << 20;  // of the text
  int depth = 1000;                      // of expressions, blocks and macros inside each other
};

struct RenderOptions {
  Limits limits = {};
  /// The time that strftime_now() formats; empty: the local time now.
  std::function<std::tm()> clock = {};
};

/// A part of a text, in bytes.
struct TextSpan {
  std::size_t begin = 0, end = 0;
  friend bool operator==(const TextSpan&, const TextSpan&) = default;
};

struct Rendered {
  std::string text;
  std::vector<TextSpan> generated;  // by {% generation %} blocks, in order of their ends; blocks may lie in others
  bool lost_marks = false;          // a {% generation %} block ran in a macro or another block whose text is a value
};

using Context = std::vector<std::pair<std::string, Value>>;

class Template {
 public:
  /// Throws DataError that names `name`, the line and what is wrong. `name` begins all messages.
  static Template parse(std::string_view source, const std::string& name);

  /// Throws DataError: the template refuses the context by raise_exception(), uses something that does not exist or is
  /// not supported, or passes a limit.
  Rendered render(const Context& context, const RenderOptions& options = {}) const;

  bool has_generation_marks() const;
  const std::string& name() const { return name_; }

 private:
  Template(std::string name, std::shared_ptr<const SyntaxTree> tree);

  std::string name_;
  std::shared_ptr<const SyntaxTree> tree_;
};

}  // namespace phalanx::jinja
