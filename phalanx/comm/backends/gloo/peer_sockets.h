// PeerSockets: the TCP connections on which the ranks of a group exchange messages, and how they are made. Torch-free.
//
// - Every rank listens on one port while the group is made, and on none afterwards. Between two ranks there are two
//   connections, one for the data of each direction. The rank that receives the data makes it.
// - A connection begins with the store's handshake (store_handshake.h). Its secret is made for this listener: from the
//   job's secret, and from a random token that the listener gives the other ranks through the store. So only ranks that
//   the store lets in are let in here, even if the job has no secret.
// - Whoever cannot prove that is refused and logged. A connection that has not greeted within 10 s is closed.
// - Nothing is encrypted.
//
//   PeerListener listener("10.0.0.1", store.derived_key("messages of group 'world'"));
//   auto offers = rendezvous(listener.offer());                  // of all ranks, in rank order
//   std::vector<PeerSockets> peers = listener.connect(rank, offers, 30s, [&] { throw_if_a_rank_is_dead(); });
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "phalanx/base/unique_fd.h"

namespace phalanx {

/// The two connections to one rank. They do not block. Both are empty for this rank itself.
struct PeerSockets {
  UniqueFd to;    // this rank sends data; the peer requests them
  UniqueFd from;  // the peer sends data
};

class PeerListener {
 public:
  /// `host`: the address of this node that the other ranks can reach. `key`: of the job, for this group; may be empty.
  /// Throws CommError if it cannot listen there.
  PeerListener(const std::string& host, std::string key);

  /// What the other ranks must know to connect.
  const std::string& offer() const noexcept { return offer_; }

  /// Connects to all ranks and accepts all their connections; then listens no longer. Calls check() every 100 ms: if
  /// that throws, so does this. Throws CommError that names a rank that cannot be reached, or the ranks that have not
  /// connected within the timeout.
  /// Raises the process's soft limit of descriptors to the hard one. It does so for any number of ranks: what is opened
  /// later, by groups, stores and data files, must find room, too.
  /// REQUIRES: all ranks call it, with the offers of all, and the same key. Called once.
  std::vector<PeerSockets> connect(int rank, const std::vector<std::string>& offers, std::chrono::milliseconds timeout,
                                   const std::function<void()>& check);

 private:
  std::string key_, offer_;
  UniqueFd listener_;
};

}  // namespace phalanx
