// The gloo headers found at build time may be older than the gloo inside libtorch. So this file derives from, makes and
// calls no gloo type: devices come from ProcessGroupGloo's static makers and are only passed on. gloo_symbols.cmake
// checks the object file.
#include "phalanx/measure/collectives/c10d_gloo_group.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <csignal>

namespace phalanx::measure {
namespace {

// Adapts our store to c10d. It carries the addresses of gloo's sockets and nothing else.
class StoreForC10d final : public c10d::Store {
 public:
  explicit StoreForC10d(std::shared_ptr<phalanx::Store> store)
      : c10d::Store(store->timeout()), store_(std::move(store)) {}

  c10::intrusive_ptr<c10d::Store> clone() override { return c10::make_intrusive<StoreForC10d>(store_); }
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    store_->set(key, std::string(value.begin(), value.end()));
  }
  std::vector<std::uint8_t> get(const std::string& key) override { return bytes(store_->get(key, getTimeout())); }
  std::vector<std::uint8_t> compareSet(const std::string& key, const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& desired) override {
    // In c10d an empty expected value stands for an absent key.
    std::optional<std::string> wanted;
    if (!expected.empty()) wanted = std::string(expected.begin(), expected.end());
    const auto held = store_->compare_and_set(key, wanted, std::string(desired.begin(), desired.end()));
    return held ? bytes(*held) : expected;
  }
  std::int64_t add(const std::string& key, std::int64_t value) override { return store_->add(key, value); }
  bool deleteKey(const std::string& key) override { return store_->delete_key(key); }
  bool check(const std::vector<std::string>& keys) override {
    for (const auto& key : keys)
      if (!store_->try_get(key)) return false;
    return true;
  }
  std::int64_t getNumKeys() override { throw std::runtime_error("the store under gloo cannot count its keys"); }
  void wait(const std::vector<std::string>& keys) override { store_->wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    store_->wait(keys, timeout);
  }

 private:
  static std::vector<std::uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }
  std::shared_ptr<phalanx::Store> store_;
};

// gloo writes to its sockets without MSG_NOSIGNAL. So when a peer dies, SIGPIPE would end this process before the
// write's error can be reported. A handler that the program installed stays.
void ignore_broken_pipes() {
  struct sigaction current {};
  if (sigaction(SIGPIPE, nullptr, &current) != 0 || current.sa_handler != SIG_DFL) return;
  current.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &current, nullptr);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_group(std::shared_ptr<Store> store, int rank, int size,
                                                  const std::string& host, std::chrono::milliseconds timeout) {
  ignore_broken_pipes();
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(host));
  options->threads = 1;  // collectives of one group run one after the other
  return c10::make_intrusive<c10d::ProcessGroupGloo>(c10::make_intrusive<StoreForC10d>(std::move(store)), rank, size,
                                                     std::move(options));
}

}  // namespace phalanx::measure
