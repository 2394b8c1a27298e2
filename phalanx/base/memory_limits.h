// How much memory this process may still take, and what says so: the limits that apply to it, each with what is in use.
//
// - RLIMIT_DATA (`ulimit -d`): private writable memory; an allocation beyond it fails. Memory that is
//   shared with other processes is not counted.
// - RLIMIT_AS (`ulimit -v`): everything that is mapped, shared memory of other processes included.
// - cgroup v1 and v2 (containers, Slurm, systemd): everything that the group's processes use together; beyond it the
//   kernel kills. A group is limited by its parents, too: all that limit are told, since others take from a parent.
//   What the kernel takes back before it kills (cache of files, reclaimable slabs) does not count as in use.
// - The machine: MemAvailable, which its other processes share.
//
// What cannot be read (no /proc, no cgroup) limits nothing. Linux only; torch-free. Reads a few files: some 100 us.
//
//   for (const MemoryLimit& limit : memory_limits()) log::info(limit.text());
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "phalanx/base/error.h"

namespace phalanx {

/// Memory that is not there: predicted before it is taken, or found out by an allocation that failed.
class MemoryError : public Error {
 public:
  using Error::Error;
  const char* kind() const noexcept override { return "MemoryError"; }
};

struct MemoryLimit {
  enum class Counts { private_memory, mappings, everything };
  enum class SharedBy { process, node, device };  // whose processes or threads take from the same

  std::string name;  // "RLIMIT_DATA", "cgroup /job_7 (v2)"
  Counts counts = Counts::everything;
  SharedBy shared_by = SharedBy::node;
  std::uint64_t bytes = 0;
  std::uint64_t used = 0;
  /// Of the limit: processes that are told the same take from the same one, whatever each calls it. Empty: this process
  /// alone takes from it, or it is not known who else does.
  std::string domain;

  std::uint64_t available() const noexcept { return bytes > used ? bytes - used : 0; }
  std::string text() const;  // "RLIMIT_DATA: 512 MiB, of which 130 MiB are in use"
};

/// `root` stands for "/", for tests.
std::vector<MemoryLimit> memory_limits(const std::filesystem::path& root = "/");

/// Of this machine, until it is booted anew; processes of one machine get the same. Empty where it is not known.
std::string node_identity(const std::filesystem::path& root = "/");

}  // namespace phalanx
