#include "phalanx/data/jinja/template.h"

#include <fmt/format.h>

#include "phalanx/base/error.h"
#include "phalanx/data/jinja/lexer.h"
#include "phalanx/data/jinja/parser.h"
#include "phalanx/data/jinja/run.h"

namespace phalanx::jinja {

Template::Template(std::string name, std::shared_ptr<const SyntaxTree> tree)
    : name_(std::move(name)), tree_(std::move(tree)) {}

Template Template::parse(std::string_view source, const std::string& name) {
  return {name, std::make_shared<const SyntaxTree>(parse_template(source, name))};
}

bool Template::has_generation_marks() const { return tree_->has_generation_marks; }

Rendered Template::render(const Context& context, const RenderOptions& options) const {
  Run run(context, options);
  try {
    run.execute(tree_->body);
  } catch (const EvaluationError& error) {
    fail_at(name_, run.line(), error.what());
  }
  return run.result();
}

}  // namespace phalanx::jinja
