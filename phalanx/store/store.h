// Store: the key-value store with which ranks rendezvous (as in PyTorch's c10d). Knows no tensor.
//
// Contract
// - Thread-safe. Keys are 1 to 1,024 bytes, values 0 to 64 MiB. Both may hold any bytes.
// - get, get_all, wait and wait_any block until the keys exist. After the timeout (the call's, else the store's) they
//   throw a StoreTimeout that names the missing keys. All other calls return at once. Over TCP they fail with a
//   CommError 5 s after the store's timeout, or after 20 s if that is sooner. A wrong request is a StoreRequestError.
//
//   PrefixStore store(base, "rendezvous");
//   store.set(fmt::format("address/{}", rank), address);
//   auto all = store.get_all(keys, 30s);   // "... waited 30 s for 4 keys: still missing 1: rendezvous/address/3"
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "phalanx/base/error.h"

namespace phalanx {

/// The store answers, but the keys that a call waited for did not come within its timeout.
class StoreTimeout : public CommError {
  using CommError::CommError;
};

/// A request that no store can serve: a key, a value or a number of keys out of bounds, an add() to something that is
/// no integer. Nothing was sent, or the store has answered: its connection is as good as before.
class StoreRequestError : public CommError {
  using CommError::CommError;
};

/// The connection to the store has ended: the process that hosts it has ended, or the network broke it.
class StoreConnectionError : public CommError {
  using CommError::CommError;
};

class Store {
 public:
  using Milliseconds = std::chrono::milliseconds;
  static constexpr std::size_t kMaxKeyBytes = 1024;
  static constexpr std::size_t kMaxValueBytes = std::size_t{64} << 20;
  static constexpr std::size_t kMaxKeysPerCall = 65'536;

  virtual ~Store() = default;

  void set(const std::string& key, const std::string& value);
  std::string get(const std::string& key, std::optional<Milliseconds> timeout = {});
  std::vector<std::string> get_all(const std::vector<std::string>& keys, std::optional<Milliseconds> timeout = {});
  std::optional<std::string> try_get(const std::string& key);
  /// Adds atomically and returns the new value. An absent key starts at 0. Counters are stored as decimal text, so
  /// get() reads them, too.
  std::int64_t add(const std::string& key, std::int64_t amount);
  void wait(const std::vector<std::string>& keys, std::optional<Milliseconds> timeout = {});
  /// Returns the first of these keys, in the given order, that exists.
  std::string wait_any(const std::vector<std::string>& keys, std::optional<Milliseconds> timeout = {});
  /// Sets the key to `desired` if it holds `expected` (nullopt: if it does not exist). Returns the value that it then
  /// holds.
  std::optional<std::string> compare_and_set(const std::string& key, const std::optional<std::string>& expected,
                                             const std::string& desired);
  /// True if the key existed.
  bool delete_key(const std::string& key);

  /// Makes the store set the key when this process dies, is killed, or drops the store without cancel_when_lost(key).
  /// So peers learn of a death without asking. An in-process store cannot lose its owner, so there it never happens.
  void set_when_lost(const std::string& key, const std::string& value);
  void cancel_when_lost(const std::string& key);

  Milliseconds timeout() const noexcept { return timeout_; }
  void set_timeout(Milliseconds timeout) { timeout_ = timeout; }  // call it before threads share the store
  virtual std::string describe() const = 0;                       // "store at 127.0.0.1:40123", for errors
  /// A key that only processes with the store's secret can compute; another one for each purpose. Empty if the store
  /// has no secret. Nothing is sent.
  virtual std::string derived_key(const std::string& purpose) const { return (void)purpose, std::string(); }

  /// Another client of the same store, with the same timeout, not interrupted. It connects at its first call.
  virtual std::shared_ptr<Store> clone() const = 0;
  /// Ends this client's calls, so that a thread in a call can be stopped although the store is silent. Any thread may
  /// call it. Once `after` has passed, all calls of this client in progress on any thread, and all later ones, throw a
  /// CommError. The earliest time counts; nothing undoes it. The request of such a call may or may not have been
  /// executed. Its connection is closed, but set_when_lost keys stay until the client is dropped. Other clients, clones
  /// included, continue. A thread that may be interrupted therefore uses a clone(), so that no other thread is
  /// affected. A PrefixStore interrupts its base.
  void interrupt(Milliseconds after = {}) noexcept;

 protected:
  explicit Store(Milliseconds timeout) : timeout_(timeout) {}
  friend class PrefixStore;

  enum class WaitFor { values, all, any };
  // The caller has checked the bounds of keys and values. do_wait returns with WaitFor::values the values of the keys,
  // with WaitFor::all nothing, with WaitFor::any one string: the first existing key.
  virtual void do_set(const std::string& key, const std::string& value) = 0;
  virtual std::optional<std::string> do_try_get(const std::string& key) = 0;
  virtual std::int64_t do_add(const std::string& key, std::int64_t amount) = 0;
  virtual std::vector<std::string> do_wait(const std::vector<std::string>& keys, WaitFor mode,
                                           Milliseconds timeout) = 0;
  virtual std::optional<std::string> do_compare_and_set(const std::string& key,
                                                        const std::optional<std::string>& expected,
                                                        const std::string& desired) = 0;
  virtual bool do_delete(const std::string& key) = 0;
  virtual void do_set_when_lost(const std::string& key, const std::optional<std::string>& value) = 0;
  virtual void do_interrupt(std::chrono::steady_clock::time_point at) noexcept = 0;

 private:
  Milliseconds timeout_;
};

/// A view of another store in which every key gets the prefix "prefix/". It keeps several users of one store apart.
class PrefixStore final : public Store {
 public:
  PrefixStore(std::shared_ptr<Store> base, std::string prefix);
  std::string describe() const override { return base_->describe(); }
  std::string derived_key(const std::string& purpose) const override { return base_->derived_key(purpose); }
  std::shared_ptr<Store> clone() const override;

 private:
  void do_set(const std::string& key, const std::string& value) override;
  std::optional<std::string> do_try_get(const std::string& key) override;
  std::int64_t do_add(const std::string& key, std::int64_t amount) override;
  std::vector<std::string> do_wait(const std::vector<std::string>& keys, WaitFor mode, Milliseconds timeout) override;
  std::optional<std::string> do_compare_and_set(const std::string& key, const std::optional<std::string>& expected,
                                                const std::string& desired) override;
  bool do_delete(const std::string& key) override;
  void do_set_when_lost(const std::string& key, const std::optional<std::string>& value) override;
  void do_interrupt(std::chrono::steady_clock::time_point at) noexcept override { base_->do_interrupt(at); }

  std::shared_ptr<Store> base_;
  std::string prefix_;
};

}  // namespace phalanx
