// Ends a process without running the static destructors of its libraries. libtorch's destructors remove its operators
// one by one. This takes a quarter to a third of the processor time of a short program, for memory that is released
// with the process anyway.
//
// Call it first in main(), in a program that needs no destructor of a global or static object that existed before.
// After main() returns, or in exit():
// - atexit() handlers from after the call run, and static objects from after the call are destroyed, as usual;
// - stdio and std::cout are flushed;
// - the process ends with its status. Handlers and objects from before the call are left alone.
// Under AddressSanitizer and ThreadSanitizer, which report at the very end, the call does nothing.
//
//   int main(int argc, char** argv) {
//     phalanx::skip_earlier_static_destructors();
//     return run(argc, argv);
//   }
#pragma once

namespace phalanx {

void skip_earlier_static_destructors();

}  // namespace phalanx
