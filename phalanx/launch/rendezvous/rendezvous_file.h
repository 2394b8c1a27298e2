// A file through which the rank that hosts the store tells the others where it is, and the secret that lets them in.
// Torch-free.
//
// For ranks that share a folder and no launcher of ours: under srun and mpirun, and with file:// as the init method.
// Only the address travels by the file, not the rendezvous itself: locks of network file systems are not to be relied
// upon, and only a connection tells at once that a rank has died. The port is the system's choice, so nothing collides.
//
// - The file has mode 0600 and appears whole (a scratch file, renamed). A file of another user, or one that others may
//   read, is refused. A file that a job left behind when it crashed does no harm: the host replaces it, and readers who
//   were quicker find nobody there and read again.
// - Readers list the folder before they look: NFS would else go on saying for a minute that there is no such file.
//
//   RendezvousFile file(path);
//   file.publish({server.address(), secret});            // the host
//   auto store = file.connect(timeout, {}, secret);      // every rank
//   file.remove();                                       // the host, when all are there
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "phalanx/store/tcp_store.h"

namespace phalanx {

struct StoreTicket {
  HostPort address;
  std::string secret;  // empty: it came to the host by its environment, and must come to the others so too
};

class RendezvousFile {
 public:
  explicit RendezvousFile(std::string path) : path_(std::move(path)) {}

  void publish(const StoreTicket& ticket) const;
  /// nullopt if there is no file (yet). Throws ConfigError: not private, or no ticket.
  std::optional<StoreTicket> read() const;
  /// Waits for the file and for the store that it names. `own_secret` is this rank's, from its environment, or empty.
  /// Throws CommError after the timeout, saying what was tried.
  std::shared_ptr<TcpStore> connect(std::chrono::milliseconds timeout, const std::string& own_secret) const;
  void remove() const noexcept;
  const std::string& path() const noexcept { return path_; }

 private:
  std::string path_;
};

/// $TMPDIR/phalanx-<uid> (or under /tmp), made with mode 0700 if it is not there. Throws ConfigError if it is another
/// user's, a link, or open to others.
std::string private_temp_folder();

}  // namespace phalanx
