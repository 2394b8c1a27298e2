#include "phalanx/comm/backends/mpi/mpi_table.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <filesystem>
#include <string>
#include <vector>

#include "phalanx/base/env.h"
#include "phalanx/base/error.h"

namespace phalanx {
namespace {

constexpr const char* kModule = "libphalanx_mpi.so";

/// Where the module may be: beside the program, in the installation's folder, and in the loader's search path.
std::vector<std::string> module_places() {
  if (const auto given = env_string("PHALANX_MPI_MODULE")) return {*given};
  std::vector<std::string> places;
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  for (const char* folder :
       {".", "..", "../bin", "../lib/phalanx", "../../lib/phalanx", "../lib64/phalanx", "../../lib64/phalanx"}) {
    const std::filesystem::path place = program / folder / kModule;
    if (!error && std::filesystem::exists(place, error)) places.push_back(place.string());
  }
  places.emplace_back(kModule);
  return places;
}

const MpiTable& load_mpi() {
  std::string why;
  for (const std::string& place : module_places()) {
    // Never closed. Open MPI's plug-ins look for its symbols among the global ones.
    void* const handle = dlopen(place.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (handle == nullptr) {
      const char* text = dlerror();
      why += fmt::format("{}{}", why.empty() ? "" : "; ", text != nullptr ? text : place);
      continue;
    }
    const auto table_of = reinterpret_cast<const MpiTable* (*)()>(dlsym(handle, kMpiTableSymbol));
    const MpiTable* const table = table_of == nullptr ? nullptr : table_of();
    if (table != nullptr && table->size == sizeof(MpiTable)) return *table;
    throw ConfigError(fmt::format("backend mpi: '{}' is of another build of Phalanx: install the one of this", place));
  }
  throw ConfigError(fmt::format(
      "backend mpi: {}, the part of Phalanx that calls MPI, cannot be loaded: {}. It needs Open MPI (Debian: "
      "libopenmpi3); PHALANX_MPI_MODULE names its file where it is in another place",
      kModule, why));
}

}  // namespace

const MpiTable& mpi() {
  static const MpiTable& table = load_mpi();
  return table;
}

}  // namespace phalanx
