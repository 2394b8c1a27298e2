// OutgoingLink, IncomingLink: the messages from one rank to another, at either end of their connection. Torch-free.
//
// The receiver requests each message of a program, so no byte of it travels before its memory is known:
//   receiver to sender   frame: element type, count and tag of a posted receive
//   sender to receiver   frame: the same of the matching send; then its bytes, if both agree
//   receiver to sender   frame with kGaveUpTag: it gives up the group; `count` is the number of collectives it has done
// Messages of collectives (kCollectiveTag) are not requested: both ranks know what is sent, and when. If one arrives
// before its receive is posted, the receiver reads no further until then.
// Sends and requests of one tag match in the order in which they were posted. A mismatch is an error at both ends.
// Frames are in the byte order of the ranks, which all have the same.
//
// The links read from and write to the memory of the transfers. They never block, and know no thread and no lock.
// Their owner calls read() and write() when epoll says that the socket is ready. Each call moves about a MiB at most.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "phalanx/base/unique_fd.h"
#include "phalanx/comm/backend.h"

namespace phalanx {

using ErrorText = std::shared_ptr<const std::string>;  // shared: a link fails without memory for its messages

/// One message: a send or a receive.
class Message {
 public:
  explicit Message(const Transfer& transfer) : transfer_(transfer) {}
  const Transfer& transfer() const noexcept { return transfer_; }
  std::size_t bytes() const noexcept;
  /// True once the memory is no longer used. A send is done when the socket has taken its bytes.
  bool is_done() const noexcept { return is_done_.load(std::memory_order_acquire); }
  // REQUIRES: is_done(). Both are empty if the message has passed.
  const std::string& mismatch() const noexcept { return mismatch_; }
  std::string error() const { return error_ ? *error_ : std::string(); }

 private:
  friend class MessageLink;
  friend class OutgoingLink;
  friend class IncomingLink;
  Transfer transfer_;
  std::string mismatch_;
  ErrorText error_;
  std::atomic<bool> is_done_{false};
};

struct MessageFrame {
  std::int64_t count = 0;
  std::int32_t tag = 0;
  DataType dtype = DataType::u8;
  std::uint8_t reserved[3] = {};
};
static_assert(sizeof(MessageFrame) == 16);
inline constexpr std::int32_t kGaveUpTag = -1, kCollectiveTag = -2;

/// One end of the messages from one rank to another. All messages of a link fail together.
class MessageLink {
 public:
  /// `self`, `peer`: ranks, for error texts.
  MessageLink(UniqueFd socket, int self, int peer) : self_(self), peer_(peer), socket_(std::move(socket)) {}
  virtual ~MessageLink() = default;

  virtual void post(std::shared_ptr<Message> message) = 0;
  virtual void read() = 0;
  virtual void write() = 0;
  virtual bool wants_to_read() const noexcept { return true; }
  virtual bool wants_to_write() const noexcept = 0;
  /// Lets this epoll report, as `number`, when the socket is ready. Throws CommError.
  void join_epoll(int epoll, std::uint64_t number);
  /// Tells epoll what the link waits for. If that fails, the link closes.
  void update_epoll();
  /// Ends the connection, even if a forked process holds it, too. Messages that are not done fail. What has been
  /// written may be lost.
  void close(const ErrorText& error) noexcept;
  void close(std::string error) { close(std::make_shared<const std::string>(std::move(error))); }

  int fd() const noexcept { return socket_.get(); }
  bool is_open() const noexcept { return static_cast<bool>(socket_); }
  /// Tells the peer behind all that was sent, if the socket takes it, and closes.
  void give_up(std::int64_t collectives_done, const ErrorText& error) noexcept;
  /// If the peer has given up the group: the number of collectives it had done; else -1.
  std::int64_t gave_up_after() const noexcept { return gave_up_after_; }
  /// True if a message was done, or the peer gave up, since the last call.
  bool take_progress() noexcept { return std::exchange(has_progress_, false); }

 protected:
  using Pointer = std::shared_ptr<Message>;
  template <class T>
  using ByTag = std::unordered_map<int, std::deque<T>>;

  virtual void fail_all() noexcept = 0;  // fails all messages
  /// True if the system call has moved bytes. If it failed for good, closes the link.
  bool has_moved(ssize_t result);
  void done(Message& message) noexcept;
  void fail(Message& message) noexcept;
  void fail(ByTag<Pointer>& messages) noexcept;
  void take_notice(const MessageFrame& frame) noexcept;  // that the peer gives up
  const int self_, peer_;
  bool has_progress_ = false;

 private:
  bool set_epoll(std::uint32_t events) noexcept;
  UniqueFd socket_;
  int epoll_ = -1;
  std::uint64_t number_ = 0;   // the link's, in epoll
  std::uint32_t watched_ = 0;  // events that epoll waits for
  ErrorText error_;            // why it was closed
  std::int64_t gave_up_after_ = -1;
};

/// The sender's end: writes data, reads requests.
class OutgoingLink final : public MessageLink {
 public:
  using MessageLink::MessageLink;
  void post(std::shared_ptr<Message> message) override;
  void read() override;
  void write() override;
  bool wants_to_write() const noexcept override { return !queue_.empty(); }
  /// True if the peer's system has not confirmed yet all that was written.
  bool has_unconfirmed() const noexcept;

 private:
  struct Queued {
    Pointer message;
    MessageFrame frame;
    std::size_t bytes = 0;  // of data
  };
  void match(Pointer message, const MessageFrame& request);
  void take_request(const MessageFrame& request);
  void count_written(std::size_t bytes);
  void fail_all() noexcept override;

  ByTag<Pointer> sends_;          // not requested yet
  ByTag<MessageFrame> requests_;  // not met by a send yet
  std::deque<Queued> queue_;      // matched
  std::size_t written_ = 0;       // of the frame and the data of the first
  std::string received_;          // less than a frame
};

/// The receiver's end: writes requests, reads data.
class IncomingLink final : public MessageLink {
 public:
  using MessageLink::MessageLink;
  void post(std::shared_ptr<Message> message) override;
  void read() override;
  void write() override;
  bool wants_to_read() const noexcept override { return !early_; }
  bool wants_to_write() const noexcept override { return !requests_.empty(); }

 private:
  void take(std::string_view bytes);
  void take_frame(const MessageFrame& frame);
  void read_on();
  void count_read(std::size_t bytes);
  void fail_all() noexcept override;

  ByTag<Pointer> receives_;            // requested
  std::string requests_;               // not written yet
  Pointer current_;                    // its frame has come
  std::size_t read_ = 0;               // of its data
  std::string received_;               // less than a frame
  std::optional<MessageFrame> early_;  // of a collective whose receive is not posted yet
  std::string unread_;                 // what came after it
};

}  // namespace phalanx
