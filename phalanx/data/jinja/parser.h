// Reads a template's source. It does not run it.
#pragma once

#include <string>
#include <string_view>

#include "phalanx/data/jinja/syntax.h"

namespace phalanx::jinja {

struct SyntaxTree {
  Block body;
  bool has_generation_marks = false;
};

/// Throws DataError that names `name`, the line and the reason: a mistake, or a statement that chat templates do not
/// have ({% include %}, {% import %}, {% extends %}, {% block %}).
SyntaxTree parse_template(std::string_view source, const std::string& name);

}  // namespace phalanx::jinja
