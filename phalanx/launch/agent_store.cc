#include "phalanx/launch/agent_store.h"

#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "phalanx/base/error.h"

namespace phalanx {

std::string exchange_through_agent_store(const HostPort& agent, const std::string& key, const std::string* value,
                                         std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::string doing = "connecting";
  try {
    c10d::TCPStoreOptions options;
    options.port = agent.port;
    options.timeout = timeout;
    options.waitWorkers = false;
    c10d::TCPStore store(agent.host, options);
    if (value != nullptr) {
      doing = fmt::format("setting the key '{}'", key);
      store.set(key, std::vector<std::uint8_t>(value->begin(), value->end()));
      return *value;
    }
    doing = fmt::format("waiting for the key '{}'", key);
    store.setTimeout(timeout);
    const auto bytes = store.get(key);
    return {bytes.begin(), bytes.end()};
  } catch (const c10::Error& error) {
    // The store's timeout may fire a little before ours.
    if (doing.starts_with("waiting") && std::chrono::steady_clock::now() + timeout / 10 >= deadline)
      throw CommError(
          fmt::format("rank 0 has not come within {} s: it is to say where its store is, by the key '{}' of torchrun's "
                      "store at {}, and has not",
                      static_cast<double>(timeout.count()) / 1000.0, key, agent.text()));
    const std::string text = error.what_without_backtrace();
    throw CommError(
        fmt::format("torchrun's store at {}: {}: {}", agent.text(), doing, text.substr(0, text.find('\n'))));
  }
}

}  // namespace phalanx
