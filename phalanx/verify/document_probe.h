// Looks for documents that see each other: changes a token of one document and compares the losses of its neighbours,
// which must stay the same to the bit.
//
//   if (const auto leak = find_document_leak(side)) log::error(leak->text());
//
// A forward pass of a layout gives no logits, but losses of chosen tokens, which any layout gives. A few labels alone are
// kept, those at the start of the next document and at the end of the one before, so that a small change is not lost in
// the sum.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "phalanx/verify/layout_side.h"

namespace phalanx::verify {

struct DocumentLeak {
  std::int64_t row = 0;      // of this rank's batch
  std::int64_t changed = 0;  // the token that was changed, counted in the row
  std::int64_t begin = 0;    // of the document whose loss moved
  double before = 0, after = 0;

  std::string text() const;
};

/// Collective over the ranks of the model. Runs the same number of passes on every rank. The first leak on this rank;
/// none also where its batch has no row of several documents. Experts multiply tokens of all documents together, which
/// may round differently: a model of experts may move by 1e-5 of the loss.
std::optional<DocumentLeak> find_document_leak(LayoutSide& side);

}  // namespace phalanx::verify
