#include "phalanx/observe/tensorboard.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <charconv>
#include <chrono>

#include "phalanx/base/error.h"
#include "phalanx/observe/tfrecord.h"

namespace phalanx::observe {
namespace {

// The few protobuf fields of an Event are encoded here by hand. libtorch_cpu exports its own protobuf library, of
// another version, and two protobuf libraries in one process crash. The test reads the files with the real library and
// event.proto, in a process without libtorch.
class ProtoMessage {
 public:
  void add_varint(int field, std::uint64_t value) {
    append_key(field, kVarint);
    append_varint(value);
  }
  void add_double(int field, double value) {
    append_key(field, kFixed64);
    append_fixed(std::bit_cast<std::uint64_t>(value), 8);
  }
  void add_float(int field, float value) {
    append_key(field, kFixed32);
    append_fixed(std::bit_cast<std::uint32_t>(value), 4);
  }
  void add_bytes(int field, std::string_view value) {
    append_key(field, kLengthDelimited);
    append_varint(value.size());
    bytes_ += value;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  enum WireType { kVarint = 0, kFixed64 = 1, kLengthDelimited = 2, kFixed32 = 5 };

  void append_key(int field, WireType type) { append_varint(static_cast<std::uint64_t>(field) << 3 | type); }
  void append_varint(std::uint64_t value) {
    while (value >= 0x80) {
      bytes_.push_back(static_cast<char>(value | 0x80));
      value >>= 7;
    }
    bytes_.push_back(static_cast<char>(value));
  }
  void append_fixed(std::uint64_t value, int size) {
    for (int i = 0; i < size; ++i) bytes_.push_back(static_cast<char>(value >> (8 * i)));
  }

  std::string bytes_;
};

double seconds_since_epoch() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Field numbers are those of event.proto.
ProtoMessage new_event(std::int64_t step) {
  ProtoMessage event;
  event.add_double(1, seconds_since_epoch());             // wall_time
  event.add_varint(2, static_cast<std::uint64_t>(step));  // step
  return event;
}

std::string event_with_value(std::int64_t step, const ProtoMessage& value) {
  ProtoMessage summary;
  summary.add_bytes(1, value.bytes());  // value
  ProtoMessage event = new_event(step);
  event.add_bytes(5, summary.bytes());  // summary
  return event.bytes();
}

std::string metadata_of_plugin(std::string_view plugin_name) {
  ProtoMessage plugin;
  plugin.add_bytes(1, plugin_name);
  ProtoMessage metadata;
  metadata.add_bytes(1, plugin.bytes());  // plugin_data
  return metadata.bytes();
}

constexpr std::string_view kFilePrefix = "events.out.tfevents.";

/// The largest number of seconds in a file name of the folder; nullopt if there is no file.
std::optional<std::int64_t> newest_file_seconds(const std::filesystem::path& folder) {
  std::optional<std::int64_t> newest;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kFilePrefix)) continue;
    std::int64_t seconds = 0;
    std::from_chars(name.data() + kFilePrefix.size(), name.data() + name.size(), seconds);
    newest = std::max(newest.value_or(0), seconds);
  }
  return newest;
}

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "localhost";
  return name.data();
}

}  // namespace

TensorBoardWriter::TensorBoardWriter(const std::filesystem::path& folder, TensorBoardOptions options) {
  // Two writers of one process may start within a second. The count gives their files different names.
  static std::atomic<int> count{0};
  FileSystem& fs = options.file_system != nullptr ? *options.file_system : posix_file_system();
  fs.make_directory(folder);
  const std::optional<std::int64_t> newest = newest_file_seconds(folder);
  const std::int64_t seconds = std::max(static_cast<std::int64_t>(seconds_since_epoch()), newest.value_or(-1) + 1);
  path_ = folder / fmt::format("{}{:010d}.{}.{}.{}", kFilePrefix, seconds, host_name(), getpid(), count++);
  file_ = fs.create(path_);

  ProtoMessage version = new_event(0);
  version.add_bytes(3, "brain.Event:2");  // file_version
  add_event(version.bytes());
  if (options.resumed_step || newest) {
    constexpr std::uint64_t kStart = 1;
    ProtoMessage session;
    session.add_varint(1, kStart);  // status
    // Points of older files are dropped from this step on. The point of the resumed step stays.
    ProtoMessage event = new_event(options.resumed_step ? *options.resumed_step + 1 : 0);
    event.add_bytes(7, session.bytes());  // session_log
    add_event(event.bytes());
  }
  flush();
}

TensorBoardWriter::~TensorBoardWriter() {
  try {
    flush();
  } catch (const std::exception&) {  // callers that need the error call flush()
  }
}

void TensorBoardWriter::add_scalar(std::string_view tag, double value, std::int64_t step) {
  ProtoMessage entry;
  entry.add_bytes(1, tag);
  entry.add_float(2, static_cast<float>(value));  // simple_value
  add_event(event_with_value(step, entry));
}

void TensorBoardWriter::add_text(std::string_view tag, std::string_view markdown, std::int64_t step) {
  constexpr std::uint64_t kString = 7;  // DT_STRING
  ProtoMessage shape_dim;
  shape_dim.add_varint(1, 1);
  ProtoMessage shape;
  shape.add_bytes(2, shape_dim.bytes());
  ProtoMessage tensor;
  tensor.add_varint(1, kString);
  tensor.add_bytes(2, shape.bytes());
  tensor.add_bytes(8, markdown);  // string_val
  ProtoMessage entry;
  entry.add_bytes(1, tag);
  entry.add_bytes(8, tensor.bytes());
  entry.add_bytes(9, metadata_of_plugin("text"));
  add_event(event_with_value(step, entry));
}

void TensorBoardWriter::add_event(std::string_view event) {
  constexpr std::size_t kFlushBytes = 64 * 1024;
  const std::lock_guard lock(mutex_);
  append_tfrecord(pending_, event);
  if (pending_.size() < kFlushBytes) return;
  file_->write(pending_);
  pending_.clear();
}

void TensorBoardWriter::flush() {
  const std::lock_guard lock(mutex_);
  if (pending_.empty()) return;
  file_->write(pending_);
  pending_.clear();
}

}  // namespace phalanx::observe
