// Signals that make a process write the flight recorders of its ranks (flight_log.h).
//
// SIGQUIT: the first call of dump_on_flight_signal() installs a handler, unless the signal already has one, and starts
// a thread that sleeps until the handler wakes it. So a rank that computes, or hangs outside of communication, answers,
// too. Handler and thread stay until the process ends. A forked child starts its own thread at its first call.
//
// SIGUSR1 and SIGUSR2 are left alone: batch systems send them to make a job save its state.
//
// SIGTERM, if it has no handler, still ends the process, but the flight recorders are written first. A launcher ends
// the remaining ranks when one has died, perhaps before they have noticed the death.
#pragma once

#include <memory>

namespace phalanx {

class FlightLogs;

/// From now on the signals write these logs, as long as the logs live. Thread-safe.
void dump_on_flight_signal(const std::shared_ptr<FlightLogs>& logs);

}  // namespace phalanx
