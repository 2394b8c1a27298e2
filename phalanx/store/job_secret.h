// The secret of a job: whoever knows it may join, nobody else. Torch-free.
//
// Contract
// - A launcher makes one (generate_job_secret) and passes it on by PHALANX_JOB_SECRET, or by a file that
//   PHALANX_JOB_SECRET_FILE names; never on a command line, which every user of the machine can read.
// - A secret has 16 to 4,096 bytes, without line breaks. A file's trailing line break does not count.
// - A file must be a regular one that belongs to this user (or to root) and that nobody else may read or write (mode
//   0600 or 0400). Anything else is a ConfigError that says what to do; so are two variables that disagree.
// - What is proved with it, and how, stands in tcp_store_wire.h: the secret itself never travels.
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

/// From PHALANX_JOB_SECRET or PHALANX_JOB_SECRET_FILE, of this process or of what `lookup` says.
JobSecret job_secret_from_environment(
    const std::function<std::optional<std::string>(const std::string& name)>& lookup = {});

/// Throws ConfigError; `what` names the file's role in it ("PHALANX_JOB_SECRET_FILE").
std::string read_secret_file(const std::string& path, const std::string& what);

/// A whole file that only its owner may read or write. Throws ConfigError if others may, or it is not this user's (or
/// root's), CommError if it cannot be read; nullopt if there is none.
std::optional<std::string> read_private_file(const std::string& path, const std::string& what, std::size_t max_bytes);

/// Puts a file of mode 0600 there, whole at once, over one that this user owns. Throws CommError.
void write_private_file(const std::string& path, std::string_view contents);

}  // namespace phalanx
