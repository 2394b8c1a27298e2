// SIGQUIT asks a process for the flight recorders of its ranks; see flight_log.h.
//
// The first call installs a handler, unless somebody else handles the signal, and starts a thread that sleeps until the
// handler wakes it: so a rank that computes, or hangs outside of any communication, answers too. Handler and thread
// stay until the process ends; a forked child starts its own thread at its first call.
//
// SIGUSR1 and SIGUSR2 are left alone: batch systems send them to have a job save its state.
//
// SIGTERM, where nobody handles it, ends the process as ever, but the flight recorders are written first: a launcher
// ends the ranks that are left when one has died, perhaps before they have noticed.
#pragma once

#include <memory>

namespace phalanx {

class FlightLogs;

/// From now on the signal writes these, as long as they live. Thread-safe.
void dump_on_flight_signal(const std::shared_ptr<FlightLogs>& logs);

}  // namespace phalanx
