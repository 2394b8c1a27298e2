#include "phalanx/launch/agent_store.h"

#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "phalanx/base/error.h"

namespace phalanx {

std::string exchange_through_agent_store(const HostPort& agent, const std::string& key, const std::string* value,
                                         std::chrono::milliseconds timeout) {
  try {
    c10d::TCPStoreOptions options;
    options.port = agent.port;
    options.timeout = timeout;
    options.waitWorkers = false;
    c10d::TCPStore store(agent.host, options);
    if (value != nullptr) {
      store.set(key, std::vector<std::uint8_t>(value->begin(), value->end()));
      return *value;
    }
    const auto bytes = store.get(key);
    return {bytes.begin(), bytes.end()};
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    throw CommError(fmt::format("torchrun's store at {}: {} of key '{}': {}", agent.text(),
                                value != nullptr ? "set" : "get", key, text.substr(0, text.find('\n'))));
  }
}

}  // namespace phalanx
