#include "phalanx/launch/supervisor/membership.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <deque>
#include <utility>

#include "phalanx/base/unique_fd.h"
#include "phalanx/launch/supervisor/event_fd.h"

namespace phalanx {
namespace {

class LocalMembership final : public Membership {
 public:
  LocalMembership(const CoordinatorOptions& options, NodeJoin join)
      : coordinator_(options, Coordinator::Clock::now()), wake_(new_event_fd()) {
    own_address_ = join.address;
    NodeMessage message;
    message.join = std::move(join);
    send(std::move(message));
  }
  int fd() const override { return wake_.get(); }
  int number() const override { return 0; }
  std::string own_address() const override { return own_address_; }
  bool is_host() const override { return true; }
  void send(NodeMessage message) override {
    coordinator_.handle(0, message, Coordinator::Clock::now());
    for (Order& order : coordinator_.take_orders()) orders_.push_back(std::move(order));
    if (!orders_.empty()) eventfd_write(wake_.get(), 1);
  }
  std::optional<Event> next() override {
    if (orders_.empty()) {
      eventfd_t ignored = 0;
      eventfd_read(wake_.get(), &ignored);
      return std::nullopt;
    }
    Event event{std::move(orders_.front()), ""};
    orders_.pop_front();
    return event;
  }

 private:
  Coordinator coordinator_;
  std::string own_address_;
  std::deque<Order> orders_;
  UniqueFd wake_;
};

}  // namespace

std::unique_ptr<Membership> make_local_membership(const CoordinatorOptions& options, NodeJoin join) {
  return std::make_unique<LocalMembership>(options, std::move(join));
}

}  // namespace phalanx
