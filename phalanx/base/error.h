// The exceptions of Phalanx for errors that a user can cause or encounter.
//
// A message says what happened, where (file, key, rank, operation), what was expected, what was found, and what to do
// or the nearest valid choice. The program prints it once and exits with exit_status(): 2 for a wrong command line or
// configuration, 1 for everything else.
//
//   throw ConfigError(fmt::format("[training] local_batch_size is {}: expected a positive number", n));
#pragma once

#include <stdexcept>
#include <string>

namespace phalanx {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  virtual int exit_status() const noexcept { return 1; }
  virtual const char* kind() const noexcept { return "Error"; }  // the class name, for reports across processes
};

/// A wrong command line: an unknown subcommand or flag, a missing argument.
class UsageError : public Error {
 public:
  using Error::Error;
  int exit_status() const noexcept override { return 2; }
  const char* kind() const noexcept override { return "UsageError"; }
};

/// A configuration that cannot be run: unknown key, value out of range, degrees that do not divide.
class ConfigError : public Error {
 public:
  using Error::Error;
  int exit_status() const noexcept override { return 2; }
  const char* kind() const noexcept override { return "ConfigError"; }
};

/// A collective, store or rendezvous that failed: mismatch, timeout, dead peer.
class CommError : public Error {
 public:
  using Error::Error;
  const char* kind() const noexcept override { return "CommError"; }
};

/// A checkpoint or safetensors file that is missing, malformed, or of another model.
class CheckpointError : public Error {
 public:
  using Error::Error;
  const char* kind() const noexcept override { return "CheckpointError"; }
};

/// Token files, texts, tokenizers and data sets that are missing or malformed.
class DataError : public Error {
 public:
  using Error::Error;
  const char* kind() const noexcept override { return "DataError"; }
};

/// A file operation that the system refused: disk full, no permission, no such file. code() is the errno value.
class FileError : public Error {
 public:
  FileError(const std::string& message, int code) : Error(message), code_(code) {}
  int code() const noexcept { return code_; }
  const char* kind() const noexcept override { return "FileError"; }

 private:
  int code_;
};

}  // namespace phalanx
