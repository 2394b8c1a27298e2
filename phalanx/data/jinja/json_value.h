// Reads JSON as a template sees it: the keys of an object keep their order, and whole numbers stay whole.
//
//   const Value message = read_json(R"({"role": "user", "content": "Hi"})", "chat.jsonl, line 3");
#pragma once

#include <string>
#include <string_view>

#include "phalanx/data/jinja/value.h"

namespace phalanx::jinja {

/// Throws DataError whose message begins with `where`: text that is not a JSON object or a list, a key that is there
/// twice in one object, a whole number outside of 64 bits, nesting deeper than base/json_depth.h allows.
Value read_json(std::string_view text, const std::string& where);

}  // namespace phalanx::jinja
