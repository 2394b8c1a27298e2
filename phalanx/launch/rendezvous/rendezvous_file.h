// RendezvousFile: through this file the rank that hosts the store gives the other ranks its address and its secret.
// Torch-free.
//
// It is for ranks that share a folder but have no Phalanx launcher: under srun and mpirun, and with the init method
// file://. The file holds only the address; the rendezvous itself goes through the store. Locks of network file systems
// are unreliable, and only a connection shows at once that a rank has died. The system chooses the port, so ports do
// not collide.
//
// - The file has mode 0600. It is written as a scratch file and renamed, so it appears complete. A reader refuses a
//   file that belongs to another user or that others may read. A file that a crashed job left behind does no harm: the
//   host replaces it, and a reader that saw the old file cannot connect and reads again.
// - Readers list the folder before they open the file. Otherwise NFS may report for a minute that it does not exist.
//
//   RendezvousFile file(path);
//   file.publish({server.address(), secret});      // the host
//   auto store = file.connect(timeout, secret);    // every rank
//   file.remove();                                 // the host, when all ranks have joined
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "phalanx/store/tcp_store.h"

namespace phalanx {

struct StoreTicket {
  HostPort address;
  std::string secret;  // empty: the host got it from its environment, and so must the other ranks
};

class RendezvousFile {
 public:
  explicit RendezvousFile(std::string path) : path_(std::move(path)) {}

  void publish(const StoreTicket& ticket) const;
  /// nullopt if there is no file (yet). Throws ConfigError if the file is not private or holds no ticket.
  std::optional<StoreTicket> read() const;
  /// Waits for the file and connects to the store that it names. `own_secret` is the secret from this rank's
  /// environment, or empty. Throws CommError after the timeout; the error says what was tried.
  std::shared_ptr<TcpStore> connect(std::chrono::milliseconds timeout, const std::string& own_secret) const;
  void remove() const noexcept;
  const std::string& path() const noexcept { return path_; }

 private:
  std::string path_;
};

/// $TMPDIR/phalanx-<uid> (or under /tmp), created with mode 0700 if missing. Throws ConfigError if it belongs to
/// another user, is a link, or is open to others.
std::string private_temp_folder();

}  // namespace phalanx
