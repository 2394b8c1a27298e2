// Memory that the processes of one machine share: how it is made, found and proven to be the right one.
//
// The first member makes a memfd (no name in any file system, mode 0600, sealed against shrinking), publishes its
// process id and descriptor, and every other one opens it through /proc/<pid>/fd. A random token inside proves that the
// right memory was opened. The descriptor is closed as soon as all have mapped it, so nothing is left behind however a
// rank ends: the kernel frees the memory with the last mapping. Pages are taken when first touched, or by take().
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace phalanx {

class SharedPages {
 public:
  /// all_gather(value): every rank's value. It is called twice by every rank, or throws. On one of them failing, all
  /// do.
  using Exchange = std::function<std::vector<std::string>(const std::string&)>;

  struct Request {
    std::size_t bytes = 0;
    std::array<std::uint64_t, 3> form{};  // what the memory is for; the same on all members
    std::vector<int> members;             // ranks behind `exchange`; members[0] makes the memory
    int rank = -1;  // this rank's place in members. < 0: takes part in the exchanges, gets nullptr
    /// Run by every member once it has mapped the memory; may take() pages. A CommError fails all.
    std::function<void(SharedPages&)> prepare;
  };

  /// Collective over the ranks behind `exchange`. The memory is zero.
  static std::shared_ptr<SharedPages> make(Request request, const Exchange& exchange);
  ~SharedPages();
  SharedPages(const SharedPages&) = delete;
  SharedPages& operator=(const SharedPages&) = delete;

  /// At the beginning of a page; of the requested size.
  std::byte* data() const noexcept { return data_; }
  /// In Request::prepare only: takes these pages now, so that a full memory is an error here, not a signal later.
  void take(std::size_t begin, std::size_t bytes);

 private:
  explicit SharedPages(std::size_t bytes);
  void create(const std::array<std::uint64_t, 3>& form);                            // memfd, mapping, token
  void open(const std::string& address, const std::array<std::uint64_t, 3>& form);  // that another process made
  void map();
  void take_from(std::size_t begin, std::size_t bytes);  // of the whole, with the page before data()
  void close_descriptor();

  std::size_t bytes_;  // with the page before data()
  int descriptor_ = -1;
  std::byte* base_ = nullptr;
  std::byte* data_ = nullptr;
  std::string address_;
};

}  // namespace phalanx
