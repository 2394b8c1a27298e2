#include "phalanx/comm/testing/fake_streams.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <thread>

namespace phalanx {
namespace {

class FakeEvent final : public DeviceEvent {
 public:
  bool is_done() const override {
    const std::lock_guard lock(state_->mutex);
    return state_->done;
  }
  std::optional<std::int64_t> time_us() const override {
    const std::lock_guard lock(state_->mutex);
    if (!state_->done) return std::nullopt;
    return std::chrono::duration_cast<std::chrono::microseconds>(state_->time.time_since_epoch()).count();
  }

  struct State {
    mutable std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::chrono::system_clock::time_point time;
    void set() {
      const std::lock_guard lock(mutex);
      done = true;
      time = std::chrono::system_clock::now();
      changed.notify_all();
    }
    void wait() {
      std::unique_lock lock(mutex);
      changed.wait(lock, [this] { return done; });
    }
  };
  // Entries in a stream's queue may outlive the owner of the event.
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

thread_local DeviceStream current_fake_stream = nullptr;

}  // namespace

class FakeStreams::Stream {
 public:
  Stream() : thread_([this] { run(); }) {}
  ~Stream() {
    put({});
    thread_.join();
  }
  void put(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_one();
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      if (!work) return;
      work();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::thread thread_;
};

FakeStreams::FakeStreams(Kernels kernels) : kernels_(kernels) {}
FakeStreams::~FakeStreams() = default;

void FakeStreams::enqueue(DeviceStream stream, std::function<void()> work) {
  static_cast<Stream*>(stream)->put(std::move(work));
}
void FakeStreams::use(DeviceStream stream) { current_fake_stream = stream; }

std::shared_ptr<void> FakeStreams::enter_stream(DeviceStream stream) {
  DeviceStream before = current_fake_stream;
  current_fake_stream = stream;
  return {stream, [before](void*) { current_fake_stream = before; }};
}

DeviceStream FakeStreams::make_stream() {
  const std::lock_guard lock(mutex_);
  if (kernels_ == Kernels::at_once || streams_.empty()) streams_.push_back(std::make_unique<Stream>());
  return streams_.back().get();
}

DeviceStream FakeStreams::current_stream() const { return current_fake_stream; }

std::shared_ptr<DeviceEvent> FakeStreams::record(DeviceStream stream) {
  auto event = std::make_shared<FakeEvent>();
  enqueue(stream, [state = event->state_] { state->set(); });
  return event;
}

std::shared_ptr<DeviceEvent> FakeStreams::record_current() {
  if (current_fake_stream != nullptr) return record(current_fake_stream);
  auto event = std::make_shared<FakeEvent>();
  event->state_->set();
  return event;
}

void FakeStreams::wait(DeviceStream stream, const DeviceEvent& event) {
  enqueue(stream, [state = static_cast<const FakeEvent&>(event).state_] { state->wait(); });
}

void FakeStreams::current_waits(const DeviceEvent& event) {
  if (current_fake_stream != nullptr)
    wait(current_fake_stream, event);
  else
    static_cast<const FakeEvent&>(event).state_->wait();
}

void FakeStreams::copy(DeviceStream stream, void* to, const void* from, std::size_t bytes) {
  enqueue(stream, [=] {
    if (bytes > 0) std::memcpy(to, from, bytes);
  });
}

std::shared_ptr<std::byte> FakeStreams::make_pinned(std::size_t bytes) {
  return std::shared_ptr<std::byte>(new std::byte[bytes + 1], std::default_delete<std::byte[]>());
}

}  // namespace phalanx
