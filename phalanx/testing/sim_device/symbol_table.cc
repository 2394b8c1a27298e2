#include "phalanx/testing/sim_device/symbol_table.h"

#include <cxxabi.h>
#include <elf.h>
#include <execinfo.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "phalanx/base/mapped_file.h"

namespace phalanx::sim_device {
namespace {

std::uintptr_t program_base() {
  std::uintptr_t base = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* result) {
        *static_cast<std::uintptr_t*>(result) = info->dlpi_addr;
        return 1;  // the first is the program
      },
      &base);
  return base;
}

struct Function {
  std::uintptr_t begin;
  std::uintptr_t end;
  std::string_view name;
};

// The functions of the program's own .symtab, by address. The linker keeps it unless told to strip.
class ProgramSymbols {
 public:
  ProgramSymbols() : file_("/proc/self/exe") {
    const auto& header = at<Elf64_Ehdr>(0);
    for (std::size_t i = 0; i < header.e_shnum; ++i) {
      const auto& section = at<Elf64_Shdr>(header.e_shoff + i * sizeof(Elf64_Shdr));
      if (section.sh_type == SHT_SYMTAB) {
        read(section, at<Elf64_Shdr>(header.e_shoff + section.sh_link * sizeof(Elf64_Shdr)).sh_offset);
      }
    }
    std::ranges::sort(functions_, {}, &Function::begin);
  }

  std::optional<std::string> name_of(const void* address) const {
    const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(address) - base_;
    auto after = std::ranges::upper_bound(functions_, offset, {}, &Function::begin);
    if (after == functions_.begin() || offset >= std::prev(after)->end) return std::nullopt;
    const std::string mangled(std::prev(after)->name);
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> plain(
        abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status), &std::free);
    return status == 0 ? std::string(plain.get()) : mangled;
  }

 private:
  template <class T>
  const T& at(std::size_t offset) const {
    return *reinterpret_cast<const T*>(file_.bytes().data() + offset);
  }
  void read(const Elf64_Shdr& symbols, std::size_t names) {
    for (std::size_t at_byte = 0; at_byte < symbols.sh_size; at_byte += sizeof(Elf64_Sym)) {
      const auto& symbol = at<Elf64_Sym>(symbols.sh_offset + at_byte);
      if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC && symbol.st_size > 0)
        functions_.push_back({symbol.st_value, symbol.st_value + symbol.st_size, &at<char>(names + symbol.st_name)});
    }
  }

  MappedFile file_;
  std::uintptr_t base_ = program_base();
  std::vector<Function> functions_;
};

// "phalanx::f(int)" is; "phalanx::sim_device::f()", "void c10::f<...>(...)" and
// "std::function<...>::operator()" are not.
bool is_caller(std::string_view name) {
  const std::string_view outermost = name.substr(0, name.find('<'));
  for (const std::string_view foreign : {"sim_device::", "std::", "c10::", "at::", "torch::", "__"})
    if (outermost.find(foreign) != std::string_view::npos) return false;
  return true;
}

bool is_of_our_types(std::string_view name) {
  return name.find("phalanx::") != std::string_view::npos && name.find("sim_device::") == std::string_view::npos;
}

// "phalanx::f" of "phalanx::(anonymous namespace)::f(int)".
std::string without_arguments(std::string name) {
  constexpr std::string_view kAnonymous = "(anonymous namespace)::";
  for (std::size_t at = name.find(kAnonymous); at != std::string::npos; at = name.find(kAnonymous))
    name.erase(at, kAnonymous.size());
  return name.substr(0, name.find('('));
}

}  // namespace

std::string calling_function() {
  static const ProgramSymbols symbols;
  std::array<void*, 64> frames{};
  const int count = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  std::string next_best;
  for (int i = 1; i < count; ++i) {
    const std::optional<std::string> full = symbols.name_of(frames[static_cast<std::size_t>(i)]);
    if (!full) continue;
    std::string name = without_arguments(*full);
    if (is_caller(name)) return name;
    if (next_best.empty() && is_of_our_types(name)) next_best = std::move(name);
  }
  return next_best;
}

}  // namespace phalanx::sim_device
