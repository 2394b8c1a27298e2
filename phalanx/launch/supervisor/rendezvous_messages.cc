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

// Not by the macro, as the text says "seats" for the assignments.
template <class AnyOrder, class Visit>
void each_field(AnyOrder& order, const Visit& visit) {
  visit("kind", order.kind);
  visit("round", order.round);
  visit("member", order.member);
  visit("restarts", order.restarts);
  visit("signal", order.signal);
  visit("exit_status", order.exit_status);
  visit("seats", order.assignments);
  visit("failures", order.failures);
  visit("text", order.text);
  visit("store", order.store);
  visit("master_address", order.master_address);
  visit("master_port", order.master_port);
}
inline void to_json(nlohmann::json& json, const Order& order) {
  each_field(order, [&](const char* key, const auto& value) { json[key] = value; });
}
inline void from_json(const nlohmann::json& json, Order& order) {
  each_field(order, [&](const char* key, auto& value) { json.at(key).get_to(value); });
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
