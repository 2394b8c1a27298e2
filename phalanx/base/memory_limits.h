// The memory limits of this process, each with the amount in use: how much memory it may still allocate, and why.
//
// - RLIMIT_DATA (`ulimit -d`): private writable memory; an allocation beyond it fails. Memory shared with other
//   processes is not counted.
// - RLIMIT_AS (`ulimit -v`): everything that is mapped, including shared memory of other processes.
// - cgroup v1 and v2 (containers, Slurm, systemd): the memory of all processes of the group; beyond it the kernel
//   kills. The parents of a group limit it too. All limiting groups are reported, since other processes use a parent's
//   memory as well. Memory that the kernel reclaims before it kills (file cache, reclaimable slabs) does not count as
//   in use.
// - The machine: MemAvailable, which it shares with other processes.
//
// A limit that cannot be read (no /proc, no cgroup) is not reported. Linux only; torch-free. Reads a few files: about
// 100 us.
//
//   for (const MemoryLimit& limit : memory_limits()) log::info(limit.text());
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "phalanx/base/error.h"

namespace phalanx {

/// Too little memory: predicted before an allocation, or found when an allocation failed.
class MemoryError : public Error {
 public:
  using Error::Error;
  const char* kind() const noexcept override { return "MemoryError"; }
};

struct MemoryLimit {
  enum class Counts { private_memory, mappings, everything };
  enum class SharedBy { process, node, device };  // who shares the limit

  std::string name;  // "RLIMIT_DATA", "cgroup /job_7 (v2)"
  Counts counts = Counts::everything;
  SharedBy shared_by = SharedBy::node;
  std::uint64_t bytes = 0;
  std::uint64_t used = 0;
  /// Identifies the limit: processes with the same domain share the same limit, even if its name differs. Empty: only
  /// this process uses it, or it is unknown which others do.
  std::string domain;

  std::uint64_t available() const noexcept { return bytes > used ? bytes - used : 0; }
  std::string text() const;  // "RLIMIT_DATA: 512 MiB, of which 130 MiB are in use"
};

/// Tests replace "/" by `root`.
std::vector<MemoryLimit> memory_limits(const std::filesystem::path& root = "/");

/// Identifies this machine until its next boot. All processes of one machine get the same text. Empty if it is unknown.
std::string node_identity(const std::filesystem::path& root = "/");

}  // namespace phalanx
