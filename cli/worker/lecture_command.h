// phalanx lecture: distributed training taught section by section; each runs here.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int lecture_command(const Arguments& arguments);
extern const std::string_view kLectureHelp;

}  // namespace phalanx::cli
