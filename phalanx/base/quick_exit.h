// Ending a process without the static destructors of the libraries in it. Those of libtorch take its operators apart
// one by one: a quarter to a third of the processor time of a short program, for memory that goes with the process
// anyway.
//
// To be called first thing in main(), by programs of which nothing needs the destructor of a global or static object
// that was there before. What happens after main() returns, or in exit():
// - handlers of atexit(), and static objects, that came after the call are run and destroyed as ever;
// - stdio and std::cout are flushed;
// - the process ends with its status. What was registered or made before the call is left as it is.
// Under AddressSanitizer and ThreadSanitizer, which report at the very end, the call does nothing.
//
//   int main(int argc, char** argv) {
//     phalanx::skip_earlier_static_destructors();
#pragma once

namespace phalanx {

void skip_earlier_static_destructors();

}  // namespace phalanx
