// Looks for documents that see each other: changes a token of one document and compares the loss of a token of its
// neighbour, which must stay the same to the bit.
//
//   const DocumentProbe probe = probe_documents(side);
//   if (probe.leak) log::error(probe.leak->text());
//
// A pass of a layout gives no logits, but the loss of any chosen token, if it alone has a label. It is that of a
// forward and backward pass as a training step makes it, with its micro-batches. The gradients are dropped.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "phalanx/verify/layout_side.h"

namespace phalanx::verify {

struct DocumentLeak {
  std::int64_t row = 0;       // of this rank's batch
  std::int64_t changed = 0;   // the token that was changed, counted in the row
  std::int64_t compared = 0;  // the token whose loss moved
  double before = 0, after = 0;

  std::string text() const;
};

struct DocumentProbe {
  std::int64_t compared = 0;  // losses compared on this rank; 0: its batch has no row of two documents with labels
  std::optional<DocumentLeak> leak;  // the first on this rank
};

/// Collective over the ranks of the model. Every rank runs the same number of passes. Experts multiply tokens of all
/// documents together, which may round differently: the loss of a model of experts may move by 1e-5
/// of itself, in 16 bits by 1e-2.
DocumentProbe probe_documents(LayoutSide& side);

}  // namespace phalanx::verify
