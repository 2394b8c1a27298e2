// LocalStore: a Store within one process, for ranks that are threads and for the server of TcpStore.
//
//   auto store = std::make_shared<LocalStore>();   // share it between the threads
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "phalanx/comm/store.h"

namespace phalanx {

class LocalStore final : public Store {
 public:
  explicit LocalStore(Milliseconds timeout = std::chrono::seconds(300)) : Store(timeout) {}
  std::string describe() const override { return "in-process store"; }

 private:
  void do_set(const std::string& key, const std::string& value) override;
  std::optional<std::string> do_try_get(const std::string& key) override;
  std::int64_t do_add(const std::string& key, std::int64_t amount) override;
  std::vector<std::string> do_wait(const std::vector<std::string>& keys, WaitFor mode, Milliseconds timeout) override;
  std::optional<std::string> do_compare_and_set(const std::string& key, const std::optional<std::string>& expected,
                                                const std::string& desired) override;
  bool do_delete(const std::string& key) override;
  void do_set_when_lost(const std::string&, const std::optional<std::string>&) override {}

  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<std::string, std::string> table_;
};

}  // namespace phalanx
