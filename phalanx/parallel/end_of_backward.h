// Callbacks at the end of a backward pass, whether it succeeds or fails.
//
//   at_end_of_backward([self] { self->finish(); }, [self] { self->abandon(); });      // inside a gradient hook
//
// `done` runs when the innermost running backward pass has evaluated all its nodes, before backward() returns. What it
// throws reaches the caller of backward(). `dropped` runs instead if the pass ends with an exception: other ranks may
// be waiting for data that this rank will not send.
//
// A checkpointed layer runs a backward pass inside the backward pass. The end of the inner pass is not the end of the
// outer one. Inside `done`, inside_an_outer_backward() tells the two apart.
#pragma once

#include <functional>

namespace phalanx {

/// Whether a backward pass is running on this thread.
bool inside_backward();
/// REQUIRES: a backward pass is running on this thread.
void at_end_of_backward(std::function<void()> done, std::function<void()> dropped);
/// REQUIRES: called from inside `done`.
bool inside_an_outer_backward();

}  // namespace phalanx
