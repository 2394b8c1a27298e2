// phalanx doctor: what this machine and this build have, what is missing, and how to fix it.
#pragma once

#include "cli/command.h"

namespace phalanx::cli {

int doctor_command(const Arguments& arguments);
extern const std::string_view kDoctorHelp;

}  // namespace phalanx::cli
