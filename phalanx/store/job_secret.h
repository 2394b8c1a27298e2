// The secret of a job: only processes that know it may join. Torch-free.
//
// Contract
// - A launcher makes one (generate_job_secret). It passes the secret on in PHALANX_JOB_SECRET, or in a file named by
//   PHALANX_JOB_SECRET_FILE. It never uses a command line, which every user of the node can read.
// - A secret has 16 to 4,096 bytes, without line breaks. A file's trailing line break does not count.
// - A file must be a regular file that belongs to this user (or to root) and that nobody else may read or write (mode
//   0600 or 0400). Anything else is a ConfigError that says what to do; so are two variables that disagree.
// - tcp_store_wire.h describes what is proved with the secret, and how. The secret itself is never sent.
//
//   TcpStoreServer server({.secret = generate_job_secret()});
//   TcpStore store(address, {.secret = job_secret_from_environment().value});
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace phalanx {

inline constexpr std::size_t kMinSecretBytes = 16;
inline constexpr std::size_t kMaxSecretBytes = 4096;

struct JobSecret {
  std::string value;   // empty: none was given
  std::string source;  // "PHALANX_JOB_SECRET" or "the file /data/secret", for the log
};

/// 256 bits from the kernel's generator, as 64 hexadecimal digits.
std::string generate_job_secret();

/// From PHALANX_JOB_SECRET or PHALANX_JOB_SECRET_FILE. `lookup`, if given, replaces this process's environment.
JobSecret job_secret_from_environment(
    const std::function<std::optional<std::string>(const std::string& name)>& lookup = {});

/// Throws ConfigError. `what` names the file's role in the error ("PHALANX_JOB_SECRET_FILE").
std::string read_secret_file(const std::string& path, const std::string& what);

/// Returns the contents of a file that only its owner may read or write; nullopt if there is none. Throws ConfigError
/// if others may access it, or it is not this user's (or root's). Throws CommError if it cannot be read.
std::optional<std::string> read_private_file(const std::string& path, const std::string& what, std::size_t max_bytes);

/// Writes a file of mode 0600 atomically. It may replace a file that this user owns. Throws CommError.
void write_private_file(const std::string& path, std::string_view contents);

}  // namespace phalanx
