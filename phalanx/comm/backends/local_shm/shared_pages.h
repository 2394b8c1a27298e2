// Memory that the processes of one node share: how it is made, found and verified.
//
// The first member makes a memfd (no name in any file system, mode 0600, sealed against shrinking) and publishes its
// process id and descriptor. The other members open it through /proc/<pid>/fd. A random token inside proves that they
// opened the right memory. The descriptor is closed as soon as all have mapped it, so nothing is left behind however a
// rank ends: the kernel frees the memory with the last mapping. Pages are allocated when first touched, or by take().
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
  /// all_gather(value): returns every rank's value. Every rank calls it twice, or it throws. If it fails on one rank,
  /// it fails on all.
  using Exchange = std::function<std::vector<std::string>(const std::string&)>;

  struct Request {
    std::size_t bytes = 0;
    std::array<std::uint64_t, 3> form{};  // describes the purpose of the memory; the same on all members
    std::vector<int> members;             // ranks of `exchange`; members[0] makes the memory
    int rank = -1;  // this rank's index in members. < 0: takes part in the exchanges, gets nullptr
    /// Every member runs it once it has mapped the memory. It may take() pages. A CommError fails all members.
    std::function<void(SharedPages&)> prepare;
  };

  /// Collective over the ranks of `exchange`. The memory is zero.
  static std::shared_ptr<SharedPages> make(Request request, const Exchange& exchange);
  ~SharedPages();
  SharedPages(const SharedPages&) = delete;
  SharedPages& operator=(const SharedPages&) = delete;

  /// Page-aligned, with the requested size.
  std::byte* data() const noexcept { return data_; }
  /// Allocates these pages now, so that lack of memory is an error here instead of a signal later.
  /// REQUIRES: called within Request::prepare.
  void take(std::size_t begin, std::size_t bytes);

 private:
  explicit SharedPages(std::size_t bytes);
  void create(const std::array<std::uint64_t, 3>& form);                            // memfd, mapping, token
  void open(const std::string& address, const std::array<std::uint64_t, 3>& form);  // made by another process
  void map();
  void take_from(std::size_t begin, std::size_t bytes);  // offset in the whole mapping, with the page before data()
  void close_descriptor();

  std::size_t bytes_;  // with the page before data()
  int descriptor_ = -1;
  std::byte* base_ = nullptr;
  std::byte* data_ = nullptr;
  std::string address_;
};

}  // namespace phalanx
