// HashStore: a Store within one process, for ranks that are threads and for the server of TcpStore.
//
//   auto store = std::make_shared<HashStore>();   // share it between the threads, or give each a clone()
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "phalanx/store/store.h"

namespace phalanx {

class HashStore final : public Store {
 public:
  explicit HashStore(Milliseconds timeout = std::chrono::seconds(300))
      : HashStore(timeout, std::make_shared<Table>()) {}
  std::string describe() const override { return "in-process store"; }
  std::shared_ptr<Store> clone() const override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Table {
    std::mutex mutex;
    std::condition_variable changed;
    std::unordered_map<std::string, std::string> values;
  };
  HashStore(Milliseconds timeout, std::shared_ptr<Table> table) : Store(timeout), table_(std::move(table)) {}

  void do_set(const std::string& key, const std::string& value) override;
  std::optional<std::string> do_try_get(const std::string& key) override;
  std::int64_t do_add(const std::string& key, std::int64_t amount) override;
  std::vector<std::string> do_wait(const std::vector<std::string>& keys, WaitFor mode, Milliseconds timeout) override;
  std::optional<std::string> do_compare_and_set(const std::string& key, const std::optional<std::string>& expected,
                                                const std::string& desired) override;
  bool do_delete(const std::string& key) override;
  void do_set_when_lost(const std::string& key, const std::optional<std::string>&) override { enter(key); }
  void do_interrupt(Clock::time_point at) noexcept override;
  // Takes the table's lock. Throws if this client has been interrupted.
  std::unique_lock<std::mutex> enter(const std::string& key) const;
  void require_uninterrupted(const std::string& key) const;

  const std::shared_ptr<Table> table_;                    // shared by all clones
  Clock::time_point ends_at_ = Clock::time_point::max();  // when this client's calls end; guarded by the table's lock
};

}  // namespace phalanx
