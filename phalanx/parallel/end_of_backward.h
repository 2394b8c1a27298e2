// Being called at the end of a backward pass, whichever way it ends.
//
//   at_end_of_backward([self] { self->finish(); }, [self] { self->abandon(); });      // inside a gradient hook
//
// `done` runs when the innermost running backward pass has evaluated all its nodes, before backward() returns; what it
// throws reaches the caller of backward(). `dropped` runs instead if the pass ends with an exception: other ranks may
// be waiting for what this one will not send. A checkpointed layer runs a backward pass inside the backward pass, and
// the end of that one is not the end of the outer one: inside_an_outer_backward() tells, from within `done`.
#pragma once

#include <functional>

namespace phalanx {

/// Whether a backward pass is running on this thread.
bool inside_backward();
/// Only inside a backward pass.
void at_end_of_backward(std::function<void()> done, std::function<void()> dropped);
/// Only inside `done`.
bool inside_an_outer_backward();

}  // namespace phalanx
