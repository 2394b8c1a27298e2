#include "phalanx/base/error_serialization.h"

#include <fmt/format.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>

#include "phalanx/base/error.h"
#include "phalanx/base/memory_limits.h"

namespace phalanx {

// The format: class name, errno of a FileError or 0, and message, separated by line breaks.
std::string serialize_error(const std::exception& error) {
  const auto* ours = dynamic_cast<const Error*>(&error);
  const auto* file = dynamic_cast<const FileError*>(&error);
  return fmt::format("{}\n{}\n{}", ours != nullptr ? ours->kind() : "Error", file != nullptr ? file->code() : 0,
                     error.what());
}

void throw_serialized_error(std::string_view serialized, std::string_view prefix) {
  const std::size_t kind_end = serialized.find('\n');
  const std::size_t code_end = kind_end == serialized.npos ? serialized.npos : serialized.find('\n', kind_end + 1);
  if (code_end == serialized.npos) throw std::invalid_argument("no error's note");
  const std::string_view kind = serialized.substr(0, kind_end);
  const std::string message = fmt::format("{}{}", prefix, serialized.substr(code_end + 1));
  if (kind == "UsageError") throw UsageError(message);
  if (kind == "ConfigError") throw ConfigError(message);
  if (kind == "CommError") throw CommError(message);
  if (kind == "CheckpointError") throw CheckpointError(message);
  if (kind == "DataError") throw DataError(message);
  if (kind == "MemoryError") throw MemoryError(message);
  if (kind == "FileError") {
    throw FileError(message, std::stoi(std::string(serialized.substr(kind_end + 1, code_end - kind_end - 1))));
  }
  throw Error(message);
}

}  // namespace phalanx
