// Makes sure that the standard streams are open when a program starts, and written when it ends.
//
//   int main() {
//     open_standard_streams();
//     return status_after_output("train", run());
//   }
#pragma once

#include <string_view>

namespace phalanx::cli {

/// Opens /dev/null for every closed standard stream. Otherwise the next opened file would get the stream's number,
/// and printed text would go into that file.
/// REQUIRES: the program has not opened any file yet.
void open_standard_streams();

/// Returns the exit status of a program that ends with `status`. If its output could not be written, prints an error
/// and returns 1.
int status_after_output(std::string_view name, int status);

}  // namespace phalanx::cli
