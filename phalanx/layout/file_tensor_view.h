// FileTensorView: where to find a tensor in a file with a foreign layout. It may have another name, be one part of a
// larger tensor, or be transposed. It does not use torch.
//
//   FileTensorView("model.norm.weight");                                       // the same tensor under another name
//   FileTensorView("h.0.attn.c_attn.weight", {.transposed = true, .part = 1, .parts = 3});
//
//   FileTensorView("self_attn.qkv_proj.weight", {.part = 0, .parts = 6, .span = 4});
//
//   FileTensorView("experts.gate_up_proj", {.transposed = true, .part = 1, .parts = 2, .alternate = true, .slice = 5,
//                                           .slices = 8});
//
// The second is the middle third of the columns of the file's matrix; the tensor's rows are columns in the file. Parts
// have equal size and follow each other along the tensor's own first dimension. The third is the first four of six. The
// fourth is in the sixth of eight matrices that one tensor of the file lists; there its rows are every second column.
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
    std::int64_t span = 1;    // of the parts that the tensor is, from `part` on
    bool alternate = false;   // the first rows of all parts come first, then their second ones, ...; with span 1
    std::int64_t slice = 0;   // of the file's tensor, which has one dimension more, in front
    std::int64_t slices = 0;  // 0: it has not
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
