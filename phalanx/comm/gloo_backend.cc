#include "phalanx/comm/gloo_backend.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <numeric>

#include "phalanx/base/error.h"
#include "phalanx/comm/futex.h"
#include "phalanx/comm/gloo.h"
#include "phalanx/comm/gloo_group.h"

namespace phalanx {
namespace {

// Operations end by the communicator's clock, which knows more; gloo's own only has to be longer.
constexpr std::chrono::milliseconds kGlooTimeout = std::chrono::hours(24 * 7);
constexpr int kTagMessages = 1 << 29;        // message numbers before they wrap: odd gloo tags
constexpr int kAbortTag = kTagMessages * 2;  // no message has it

}  // namespace

GlooBackend::GlooBackend(Setup setup) : setup_(std::move(setup)), messages_(setup_.members.size(), 0) {
  watched_->id = setup_.id;
  watched_->members = setup_.members;
  if (size() > 1) {
    auto store = std::make_shared<PrefixStore>(setup_.store, setup_.id);
    store->set(fmt::format("rank/{}", rank()), "");
    std::vector<std::string> keys;
    for (int r = 0; r < size(); ++r) keys.push_back(fmt::format("rank/{}", r));
    store->wait(keys, setup_.connect_timeout);  // names the ranks that do not come
    try {
      gloo_ = make_gloo_group(store, rank(), size(), setup_.host, setup_.connect_timeout);
    } catch (const std::exception&) {
      throw CommError(fmt::format("gloo cannot connect rank {} at {} with the {} ranks of group '{}': {}", rank(),
                                  setup_.host, size(), setup_.id, gloo_error_text(std::current_exception())));
    }
    gloo_->setTimeout(kGlooTimeout);
    // Nobody goes on, and perhaps away again, while another is still connecting.
    store->set(fmt::format("connected/{}", rank()), "");
    for (auto& key : keys) key = "connected" + key.substr(key.find('/'));
    store->wait(keys, setup_.connect_timeout);
  }
  setup_.watch->add(watched_);
}

GlooBackend::~GlooBackend() = default;

std::unique_ptr<Operation> GlooBackend::start(const OperationDescription& description) {
  throw_if_aborted();
  return description.transfers.empty() ? make_gloo_collective(*this, description)
                                       : make_gloo_transfers(*this, description);
}

std::shared_ptr<Backend> GlooBackend::split(const SplitRequest& request) {
  throw_if_aborted();
  if (request.members.empty()) return nullptr;
  Setup setup = setup_;
  setup.id = fmt::format("{}.{}.{}", setup_.id, request.serial, request.members.front());
  setup.rank = request.rank;
  setup.members.clear();
  for (const int member : request.members) setup.members.push_back(setup_.members[static_cast<std::size_t>(member)]);
  return std::make_shared<GlooBackend>(std::move(setup));
}

void GlooBackend::abort(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(abort_mutex_);
    if (aborted_.load()) return;
    abort_reason_ = reason;
    aborted_.store(true);
  }
  if (gloo_) {
    setup_.watch->announce_abort(*watched_, fmt::format("rank {} gave up: {}", rank(), reason));
    // A receive that times out breaks all of gloo's connections of this group: what is under way here ends now, so that
    // no thread waits in it, and the peers notice.
    try {
      std::vector<at::Tensor> byte{at::empty({1}, at::kByte)};
      gloo_->recv(byte, (rank() + 1) % size(), kAbortTag)->wait(std::chrono::milliseconds(1));
    } catch (...) {
    }
  }
  ring(bell_->word, bell_->sleepers, false);
}

void GlooBackend::check_ranks() {
  throw_if_aborted();
  if (const std::string why = trouble(); !why.empty()) throw CommError(why);
}

void GlooBackend::throw_if_aborted() const {
  if (!aborted_.load()) return;
  const std::lock_guard lock(abort_mutex_);
  throw CommError(fmt::format("the group was aborted: {}", abort_reason_));
}

std::vector<int> GlooBackend::behind(std::uint64_t collective) const {
  std::vector<int> result;
  for (const int world_rank : setup_.watch->behind(*watched_, collective))
    for (int r = 0; r < size(); ++r)
      if (setup_.members[static_cast<std::size_t>(r)] == world_rank) result.push_back(r);
  return result;
}

int GlooBackend::next_message_tag(int destination) {
  const std::uint32_t number = messages_[static_cast<std::size_t>(destination)]++;
  return static_cast<int>(number % kTagMessages) * 2 + 1;
}

std::string gloo_error_text(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& caught) {
    const std::string text = caught.what_without_backtrace();
    return text.substr(0, text.find('\n'));
  } catch (const std::exception& caught) {
    const std::string text = caught.what();
    return text.substr(0, text.find('\n'));
  } catch (...) {
    return "unknown error";
  }
}

std::shared_ptr<Communicator> make_gloo_communicator(std::shared_ptr<Store> store, int rank, int world_size,
                                                     GlooOptions options) {
  if (world_size < 1 || rank < 0 || rank >= world_size)
    throw ConfigError(fmt::format("rank {} of a world of {}: expected ranks from 0", rank, world_size));
  // Every rank makes its communicators in the same order, so the count is a name that they agree on.
  const auto serial = store->add(fmt::format("gloo/made/{}", rank), 1);
  auto prefixed = std::make_shared<PrefixStore>(std::move(store), fmt::format("gloo/{}", serial));
  GlooBackend::Setup setup;
  setup.watch = std::make_shared<GlooWatch>(prefixed, rank, world_size);
  setup.store = prefixed;
  setup.id = "world";
  setup.members.resize(static_cast<std::size_t>(world_size));
  std::iota(setup.members.begin(), setup.members.end(), 0);
  setup.rank = rank;
  setup.host = options.host;
  setup.connect_timeout = options.communicator.first_timeout;
  return std::make_shared<Communicator>(std::make_shared<GlooBackend>(std::move(setup)), options.communicator);
}

}  // namespace phalanx
