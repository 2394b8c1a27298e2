// The standard streams of a program: there when it starts, and written when it ends.
//
//   int main() {
//     open_standard_streams();
//     return status_after_output("train", run());
//   }
#pragma once

#include <string_view>

namespace phalanx::cli {

/// Before anything is opened: a standard stream that is closed would be taken by the next file, and what is printed
/// would go into that.
void open_standard_streams();

/// The status of a program that ends with `status`: 1, and an error, where what it printed could not be written.
int status_after_output(std::string_view name, int status);

}  // namespace phalanx::cli
