// What happens when the host touches memory that belongs to a simulated device.
//
// - Device memory: a message that names the device, then the fault ends the process, as on a GPU.
// - Pinned memory that a kernel may still use: a race report (Runtime::races), and the program goes on.
// - Anything else: whatever was installed before.
#pragma once

namespace phalanx::sim_device {

class Runtime;

/// Handles SIGSEGV from then on. REQUIRES: `runtime` lives until the process ends, or until the next call;
/// nullptr: the handler leaves all faults alone.
void handle_host_faults(Runtime* runtime);

}  // namespace phalanx::sim_device
