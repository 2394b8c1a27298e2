#include "phalanx/launch/supervisor/rendezvous_messages.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "phalanx/base/error.h"
#include "phalanx/base/json_text.h"

namespace phalanx {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(WorkerFailure, rank, local_rank, host, pid, exit_status, signal, kind, message,
                                   time_s, log_file)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(NodeJoin, host, pid, address, local_world_size, node_rank, role, run_id, min_nodes,
                                   max_nodes, max_restarts, is_host)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(NodeMessage, kind, round, signal, sent_at_s, join, failures, store, master_address,
                                   master_port)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(NodeAssignment, member, node_rank, first_rank, local_world_size, host, role)

// Written out for one key: the text says "seats" for the assignments.
inline void to_json(nlohmann::json& json, const Order& order) {
  json = {{"kind", order.kind},
          {"round", order.round},
          {"member", order.member},
          {"restarts", order.restarts},
          {"signal", order.signal},
          {"exit_status", order.exit_status},
          {"seats", order.assignments},
          {"failures", order.failures},
          {"text", order.text},
          {"store", order.store},
          {"master_address", order.master_address},
          {"master_port", order.master_port}};
}
inline void from_json(const nlohmann::json& json, Order& order) {
  json.at("kind").get_to(order.kind);
  json.at("round").get_to(order.round);
  json.at("member").get_to(order.member);
  json.at("restarts").get_to(order.restarts);
  json.at("signal").get_to(order.signal);
  json.at("exit_status").get_to(order.exit_status);
  json.at("seats").get_to(order.assignments);
  json.at("failures").get_to(order.failures);
  json.at("text").get_to(order.text);
  json.at("store").get_to(order.store);
  json.at("master_address").get_to(order.master_address);
  json.at("master_port").get_to(order.master_port);
}

namespace {

template <class T>
std::string dump_message(const T& value) {
  return nlohmann::json(value).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

template <class T>
T parse_message(const std::string& text, int last_kind) {
  try {
    const auto json = nlohmann::json::parse(text);
    const int kind = json.at("kind").get<int>();
    if (kind < 0 || kind > last_kind) throw CommError(fmt::format("unknown kind {}", kind));
    return json.get<T>();
  } catch (const std::exception& error) {
    const auto* of_json = dynamic_cast<const nlohmann::json::exception*>(&error);
    throw CommError(
        fmt::format("the rendezvous holds a message that this program does not understand ({}): run the same "
                    "Phalanx on every node",
                    of_json ? json_value_fault(*of_json) : error.what()));
  }
}

}  // namespace

std::string to_json(const NodeMessage& message) { return dump_message(message); }
std::string to_json(const Order& order) { return dump_message(order); }
NodeMessage parse_node_message(const std::string& text) {
  return parse_message<NodeMessage>(text, static_cast<int>(NodeMessage::Kind::bye));
}
Order parse_order(const std::string& text) { return parse_message<Order>(text, static_cast<int>(Order::Kind::end)); }

}  // namespace phalanx
