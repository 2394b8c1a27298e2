// Where a tensor lies in a file that others have laid out: under another name, as one part of a larger tensor, turned.
// Knows no torch.
//
//   FileTensorView("model.norm.weight");                                       // the same tensor under another name
//   FileTensorView("h.0.attn.c_attn.weight", {.transposed = true, .part = 1, .parts = 3});
//
// The second is the middle third of the columns of the file's matrix, and its rows are columns there. Parts are equal;
// they lie one after the other along the tensor's own first dimension.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace phalanx {

struct FileTensorView {
  struct Form {
    bool transposed = false;  // of a matrix
    std::int64_t part = 0;
    std::int64_t parts = 1;
    bool operator==(const Form&) const = default;
  };
  FileTensorView(std::string name, const Form& form) : name(std::move(name)), form(form) {}
  FileTensorView(std::string name)
      : name(std::move(name)) {}  // NOLINT(google-explicit-constructor): most are that alone

  std::string name;
  Form form;
  bool operator==(const FileTensorView&) const = default;
};

}  // namespace phalanx
