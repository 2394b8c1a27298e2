#include "phalanx/data/token_file.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <vector>

#include "phalanx/base/content_hash.h"
#include "phalanx/base/error.h"
#include "phalanx/base/hub_name.h"
#include "phalanx/base/log.h"
#include "phalanx/base/mapped_file.h"
#include "phalanx/data/raw_ids.h"
#include "phalanx/data/token_sidecar.h"

namespace phalanx::data {
namespace {

constexpr char kMegatronMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};
constexpr std::int64_t kMegatronHeaderBytes = 9 + 8 + 1 + 8 + 8;
constexpr std::int64_t kLlmcHeaderBytes = 256 * 4;
constexpr std::int32_t kLlmcMagicU16 = 20240520;
constexpr std::int32_t kLlmcMagicU32 = 20240801;
constexpr std::int32_t kLlmcEvalMagic = 20240522;
constexpr std::int64_t kFullCheckTokens = std::int64_t{1} << 24;

template <typename T>
T load_le(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

bool is_file(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
}

// Refuses what cannot be a token file, with a message for a user who names one.
void require_file(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    if (errno != ENOENT && errno != ENOTDIR) return;  // opening it will give the error
    throw DataError(
        fmt::format("{}: no such file{}", path,
                    hub_hint(path).empty() ? ": expected a token file; `phalanx tokenize` makes one" : hub_hint(path)));
  }
  if (S_ISDIR(status.st_mode)) {
    throw DataError(fmt::format("{} is a directory: expected a token file; `phalanx tokenize` makes one", path));
  }
}

bool ends_with(const std::string& text, std::string_view suffix) {
  return text.size() >= suffix.size() && text.compare(text.size() - suffix.size(), suffix.size(), suffix) == 0;
}

template <typename T>
void widen(const std::byte* from, std::span<std::int64_t> out) {
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = std::int64_t{load_le<T>(from + i * sizeof(T))};
}

void widen(TokenType type, const std::byte* from, std::span<std::int64_t> out) {
  switch (type) {
    case TokenType::u8:
      return widen<std::uint8_t>(from, out);
    case TokenType::i8:
      return widen<std::int8_t>(from, out);
    case TokenType::i16:
      return widen<std::int16_t>(from, out);
    case TokenType::i32:
      return widen<std::int32_t>(from, out);
    case TokenType::i64:
      return widen<std::int64_t>(from, out);
    case TokenType::u16:
      return widen<std::uint16_t>(from, out);
    case TokenType::u32:
      return widen<std::uint32_t>(from, out);
  }
}

/// Rows of a large file are read here and there. Read-ahead, which may be megabytes for each, would read most of the
/// file for a few rows.
bool is_read_at_random(std::uint64_t bytes) { return bytes > (std::uint64_t{64} << 20); }

MappedFile mapped(const std::string& path) {
  std::error_code error;
  const std::uintmax_t bytes = std::filesystem::file_size(path, error);
  return MappedFile(path, !error && is_read_at_random(bytes) ? MappedFile::Access::random : MappedFile::Access::normal);
}

}  // namespace

struct TokenFile::Mapping {
  MappedFile ids;
  MappedFile index;  // Megatron's .idx
};

const char* to_string(TokenFormat format) {
  switch (format) {
    case TokenFormat::megatron:
      return "Megatron";
    case TokenFormat::llmc:
      return "llm.c";
    case TokenFormat::raw:
      return "raw ids";
  }
  return "";
}

const char* to_string(TokenType type) {
  switch (type) {
    case TokenType::u8:
      return "uint8";
    case TokenType::i8:
      return "int8";
    case TokenType::i16:
      return "int16";
    case TokenType::i32:
      return "int32";
    case TokenType::i64:
      return "int64";
    case TokenType::u16:
      return "uint16";
    case TokenType::u32:
      return "uint32";
  }
  return "";
}

std::int64_t bytes_of(TokenType type) {
  switch (type) {
    case TokenType::u8:
    case TokenType::i8:
      return 1;
    case TokenType::i16:
    case TokenType::u16:
      return 2;
    case TokenType::i32:
    case TokenType::u32:
      return 4;
    case TokenType::i64:
      return 8;
  }
  return 0;
}

std::optional<TokenType> token_type_named(std::string_view name) {
  for (const TokenType type :
       {TokenType::u8, TokenType::i8, TokenType::i16, TokenType::i32, TokenType::i64, TokenType::u16, TokenType::u32}) {
    if (name == to_string(type)) return type;
  }
  return std::nullopt;
}

TokenFile::TokenFile(const std::string& path, TokenFileOptions options)
    : stated_(options.type), vocab_size_(options.vocab_size) {
  if (vocab_size_ < 0) throw ConfigError(fmt::format("{}: vocab_size is {}: expected 0 or more", path, vocab_size_));
  std::string prefix = path;
  if (ends_with(path, ".bin") || ends_with(path, ".idx")) prefix.resize(path.size() - 4);
  const bool has_index = is_file(prefix + ".idx");

  if (options.format == TokenFormat::megatron || (!options.format && (ends_with(path, ".idx") || has_index))) {
    open_megatron(prefix);
  } else {
    if (!is_file(path) && is_file(path + ".bin")) {
      throw DataError(
          fmt::format("{0}: no such file, and {0}.bin has no index {0}.idx beside it; for a file of raw ids "
                      "or llm.c's format name {0}.bin itself",
                      path));
    }
    require_file(path);
    path_ = path;
    sidecar_ = read_sidecar(path_);
    mapping_ = std::make_shared<const Mapping>(Mapping{mapped(path), {}});
    if (mapping_->ids.size() == 0) throw DataError(fmt::format("{}: the file is empty: expected token ids", path));
    std::int32_t magic = 0;
    if (mapping_->ids.size() >= 4) magic = load_le<std::int32_t>(mapping_->ids.data());
    const bool looks_llmc = magic == kLlmcMagicU16 || magic == kLlmcMagicU32 || magic == kLlmcEvalMagic;
    if (options.format == TokenFormat::llmc || (!options.format && looks_llmc)) {
      open_llmc();
    } else {
      open_raw();
    }
  }
  if (!sidecar_ && is_file(sidecar_path(path_))) {
    log::info(fmt::format("{} is not what `phalanx tokenize` writes beside {}: not read", sidecar_path(path_), path_));
  }
  check_stated_type();
  check_sidecar();
  open_mask();
  check_vocabulary();
}

void TokenFile::open_mask() {
  const std::string path = mask_path(path_);
  if (!sidecar_ || sidecar_->mask.empty()) {
    if (!is_file(path)) return;
    throw DataError(
        fmt::format("{} says which tokens of {} are trained, but {} does not name it: expected the three as they were "
                    "made together; make them again, or remove the mask to train every token",
                    path, path_, sidecar_path(path_)));
  }
  if (!is_file(path)) {
    throw DataError(fmt::format(
        "{}: no such file, but {} says that only some tokens of {} are trained: expected their mask there; put it "
        "back, or make all again",
        path, sidecar_path(path_), path_));
  }
  mask_ = std::make_shared<const MappedFile>(path);
  if (static_cast<std::int64_t>(mask_->size()) != size_) {
    throw DataError(fmt::format("{}: {} bytes, but {} has {} tokens: expected one byte a token; make both again", path,
                                mask_->size(), path_, size_));
  }
  mask_hash_ = hash_of_ids(TokenType::u8, mask_->bytes());
  if (mask_hash_ != sidecar_->mask) {
    throw DataError(fmt::format("{}: its content is {}, but {} says {}: it is the mask of another file; make all again",
                                path, mask_hash_, sidecar_path(path_), sidecar_->mask));
  }
}

std::span<const std::uint8_t> TokenFile::mask() const {
  if (!mask_) return {};
  return {reinterpret_cast<const std::uint8_t*>(mask_->data()), mask_->size()};
}

std::int64_t TokenFile::trained_count(TokenRange range) const {
  if (!mask_) return range.size();
  const auto part = mask().subspan(static_cast<std::size_t>(range.begin), static_cast<std::size_t>(range.size()));
  return std::ranges::count_if(part, [](std::uint8_t one) { return one != 0; });
}

void TokenFile::check_stated_type() const {
  if (!stated_ || *stated_ == type_) return;
  throw DataError(fmt::format("{}: the type of its ids is stated as {}, but {} says {}: expected the same", path_,
                              to_string(*stated_), format_ == TokenFormat::megatron ? "its index" : "its header",
                              to_string(type_)));
}

void TokenFile::check_sidecar() const {
  if (!sidecar_) return;
  const std::string where = sidecar_path(path_);
  const auto stale = [&](const char* key, const auto& said, const auto& found) {
    throw DataError(
        fmt::format("{}: \"{}\" is {}, but {} has {}: it describes another file; remove it, or make both again by "
                    "`phalanx tokenize`",
                    where, key, said, path_, found));
  };
  if (sidecar_->type && *sidecar_->type != type_) stale("type", to_string(*sidecar_->type), to_string(type_));
  if (sidecar_->tokens && *sidecar_->tokens != size_) stale("tokens", *sidecar_->tokens, size_);
  if (sidecar_->documents && *sidecar_->documents != document_count_) {
    stale("documents", *sidecar_->documents, document_count_);
  }
  if (!sidecar_->content.empty() && sidecar_->content != content_hash()) {
    stale("content", sidecar_->content, content_hash());
  }
  if (vocab_size_ > 0 && sidecar_->vocab_size > vocab_size_) {
    throw DataError(fmt::format(
        "{}: made with a tokenizer of {} ids (so says {}), more than the model's vocab_size of {}: expected "
        "at most that; use a model with more ids or make the file with the model's tokenizer",
        path_, sidecar_->vocab_size, where, vocab_size_));
  }
}

void TokenFile::open_megatron(const std::string& prefix) {
  format_ = TokenFormat::megatron;
  path_ = prefix + ".bin";
  sidecar_ = read_sidecar(path_);
  const std::string index_path = prefix + ".idx";
  if (!is_file(path_)) {
    throw DataError(fmt::format("{}: no such file: a Megatron index needs its ids beside it", path_));
  }
  mapping_ = std::make_shared<const Mapping>(Mapping{mapped(path_), MappedFile(index_path)});
  const std::byte* at = mapping_->index.data();
  const auto bytes = static_cast<std::int64_t>(mapping_->index.size());
  if (bytes < kMegatronHeaderBytes) {
    throw DataError(fmt::format("{}: truncated: expected a header of {} bytes, found {} bytes", index_path,
                                kMegatronHeaderBytes, bytes));
  }
  if (std::memcmp(at, kMegatronMagic, sizeof kMegatronMagic) != 0) {
    throw DataError(fmt::format("{}: wrong magic: expected MMIDIDX, this is not a Megatron index", index_path));
  }
  const auto version = load_le<std::uint64_t>(at + 9);
  if (version != 1) throw DataError(fmt::format("{}: version is {}: expected 1", index_path, version));
  const auto code = load_le<std::uint8_t>(at + 17);
  constexpr TokenType kTypes[] = {TokenType::u8,  TokenType::u8,  TokenType::i8,  TokenType::i16, TokenType::i32,
                                  TokenType::i64, TokenType::u16, TokenType::u16, TokenType::u16};
  if (code == 0 || code == 6 || code == 7 || code > 8) {
    throw DataError(
        fmt::format("{}: dtype code is {}: expected an integer type, 1 (uint8), 2 (int8), 3 (int16), "
                    "4 (int32), 5 (int64) or 8 (uint16)",
                    index_path, code));
  }
  type_ = kTypes[code];
  const auto sequences = load_le<std::uint64_t>(at + 18);
  const auto documents = load_le<std::uint64_t>(at + 26);
  // Compared by division first: a wrong count must not overflow the product.
  const auto room = static_cast<std::uint64_t>(bytes - kMegatronHeaderBytes);
  if (sequences > room / 12 || documents > room / 8 || sequences * 12 + documents * 8 > room) {
    throw DataError(
        fmt::format("{}: the header tells of {} sequences and {} document bounds, too many for the {} bytes "
                    "of the file: truncated or not an index",
                    index_path, sequences, documents, bytes));
  }
  const std::uint64_t rest = room - (sequences * 12 + documents * 8);
  if (rest != 0 && rest != sequences) {  // one int8 per sequence: modes of multimodal data, which training ignores
    throw DataError(fmt::format("{}: expected {} bytes for {} sequences and {} document bounds, found {}", index_path,
                                bytes - static_cast<std::int64_t>(rest), sequences, documents, bytes));
  }
  if (sequences == 0) throw DataError(fmt::format("{}: holds no sequence: expected token ids", index_path));
  lengths_ = at + kMegatronHeaderBytes;
  pointers_ = lengths_ + sequences * 4;
  documents_ = pointers_ + sequences * 8;

  const std::int64_t width = data::bytes_of(type_);
  const auto bin_bytes = static_cast<std::int64_t>(mapping_->ids.size());
  std::int64_t expected = 0;  // byte at which the next sequence must begin
  for (std::uint64_t i = 0; i < sequences; ++i) {
    const auto length = load_le<std::int32_t>(lengths_ + i * 4);
    const auto pointer = load_le<std::int64_t>(pointers_ + i * 8);
    if (length < 0) throw DataError(fmt::format("{}: sequence {} has length {}", index_path, i, length));
    if (pointer != expected) {
      throw DataError(fmt::format("{}: sequence {} begins at byte {}: expected {} (sequences one after another)",
                                  index_path, i, pointer, expected));
    }
    expected += length * width;
    if (expected > bin_bytes) {
      throw DataError(fmt::format("{}: truncated: its index says that sequence {} ends at byte {}, the file has {}",
                                  path_, i, expected, bin_bytes));
    }
  }
  if (expected != bin_bytes) {
    throw DataError(fmt::format("{}: expected {} bytes by its index, found {}", path_, expected, bin_bytes));
  }
  if (expected == 0) throw DataError(fmt::format("{}: holds no token", path_));
  ids_ = mapping_->ids.data();
  size_ = expected / width;

  std::int64_t previous = 0;
  for (std::uint64_t i = 0; i < documents; ++i) {
    const auto bound = load_le<std::int64_t>(documents_ + i * 8);
    if (bound < previous || (i == 0 && bound != 0) || bound > static_cast<std::int64_t>(sequences)) {
      throw DataError(fmt::format("{}: document bound {} is {}: expected ascending numbers from 0 to {}", index_path, i,
                                  bound, sequences));
    }
    previous = bound;
  }
  if (documents > 0 && previous != static_cast<std::int64_t>(sequences)) {
    throw DataError(
        fmt::format("{}: the last document ends at sequence {}: expected {}", index_path, previous, sequences));
  }
  document_count_ = documents > 1 ? static_cast<std::int64_t>(documents) - 1 : 1;
  if (documents <= 1) documents_ = nullptr;
}

void TokenFile::open_llmc() {
  format_ = TokenFormat::llmc;
  const std::byte* at = mapping_->ids.data();
  const auto bytes = static_cast<std::int64_t>(mapping_->ids.size());
  if (bytes < kLlmcHeaderBytes) {
    throw DataError(fmt::format("{}: truncated: expected llm.c's header of {} bytes, found {} bytes", path_,
                                kLlmcHeaderBytes, bytes));
  }
  const auto magic = load_le<std::int32_t>(at);
  const auto version = load_le<std::int32_t>(at + 4);
  const auto count = load_le<std::int32_t>(at + 8);
  if (magic == kLlmcEvalMagic) {
    throw DataError(
        fmt::format("{}: this is llm.c's multiple-choice evaluation file: expected a token file "
                    "(magic {} or {})",
                    path_, kLlmcMagicU16, kLlmcMagicU32));
  }
  if (magic != kLlmcMagicU16 && magic != kLlmcMagicU32) {
    throw DataError(fmt::format("{}: wrong magic {}: expected llm.c's {} (uint16 ids) or {} (uint32 ids)", path_, magic,
                                kLlmcMagicU16, kLlmcMagicU32));
  }
  const std::int32_t expected_version = magic == kLlmcMagicU16 ? 1 : 7;
  if (version != expected_version) {
    throw DataError(
        fmt::format("{}: version is {}: expected {} after magic {}", path_, version, expected_version, magic));
  }
  type_ = magic == kLlmcMagicU16 ? TokenType::u16 : TokenType::u32;
  const std::int64_t expected = kLlmcHeaderBytes + count * data::bytes_of(type_);
  if (count <= 0 || expected != bytes) {
    throw DataError(fmt::format("{}: the header tells of {} {} tokens, so of {} bytes: found {} bytes", path_, count,
                                to_string(type_), std::max(expected, kLlmcHeaderBytes), bytes));
  }
  ids_ = at + kLlmcHeaderBytes;
  size_ = count;
}

void TokenFile::open_raw() {
  format_ = TokenFormat::raw;
  if (sidecar_ && sidecar_->type && stated_ && *stated_ != *sidecar_->type) {
    throw DataError(fmt::format("{}: the type of its ids is stated as {}, but {} says {}: expected the same", path_,
                                to_string(*stated_), sidecar_path(path_), to_string(*sidecar_->type)));
  }
  if (!stated_ && sidecar_) stated_ = sidecar_->type;
  type_ = stated_.value_or(vocab_size_ > 65536 ? TokenType::u32 : TokenType::u16);
  const auto bytes = static_cast<std::int64_t>(mapping_->ids.size());
  if (bytes >= 9 && std::memcmp(mapping_->ids.data(), kMegatronMagic, sizeof kMegatronMagic) == 0) {
    throw DataError(
        fmt::format("{}: this is a Megatron index: expected its name to end in .idx, with the ids in a "
                    ".bin beside it",
                    path_));
  }
  if (!stated_) refuse_other_kinds(mapping_->ids.bytes(), path_);
  if (bytes % data::bytes_of(type_) != 0) {
    throw DataError(fmt::format("{}: {} bytes are no whole number of {} ids: truncated, or not a file of raw ids",
                                path_, bytes, to_string(type_)));
  }
  ids_ = mapping_->ids.data();
  size_ = bytes / data::bytes_of(type_);
  if (stated_) return;
  if (was_never_written(mapping_->ids.bytes())) {
    throw DataError(
        fmt::format("{}: every byte that was looked at is 0, as in a file that was made and never written: make it "
                    "again (if these are token ids all "
                    "the same: state their type by [training] dataset_dtype)",
                    path_));
  }
  if (const auto doubt = doubt_about_type(mapping_->ids.bytes(), type_)) {
    std::string what_to_do = "expected ids of an integer type, the lowest byte first: write them so";
    for (const char* type : {"uint32", "int64"}) {
      if (!doubt->ends_with(type)) continue;
      what_to_do = fmt::format(
          "state the type by [training] dataset_dtype or in {}: {{\"format\": \"phalanx.tokens\", \"type\": \"{}\"}}",
          sidecar_path(path_), type);
    }
    throw DataError(fmt::format("{}: read as raw {} ids, {}; {}", path_, to_string(type_), *doubt, what_to_do));
  }
}

std::int64_t TokenFile::ids_end() const {
  const std::int64_t said = sidecar_ ? sidecar_->vocab_size : 0;
  if (vocab_size_ == 0 || said == 0) return std::max(vocab_size_, said);
  return std::min(vocab_size_, said);
}

void TokenFile::check_vocabulary() const {
  if (ids_end() == 0) return;
  constexpr std::int64_t kBlock = 4096;
  std::vector<std::int64_t> block(kBlock);
  const auto check = [&](std::int64_t begin) {
    read(begin, std::span(block).first(static_cast<std::size_t>(std::min(kBlock, size_ - begin))));
  };
  if (size_ <= kFullCheckTokens) {
    for (std::int64_t begin = 0; begin < size_; begin += kBlock) check(begin);
  } else {
    for (std::int64_t i = 0; i < 256; ++i) check((size_ - kBlock) / 255 * i);
  }
}

TokenRange TokenFile::document(std::int64_t index) const {
  if (index < 0 || index >= document_count_) {
    throw DataError(fmt::format("{}: document {} asked for: the file has {}", path_, index, document_count_));
  }
  if (!documents_) return {0, size_};
  const std::int64_t width = data::bytes_of(type_);
  const auto start_of = [&](std::int64_t sequence) {
    const bool at_end = pointers_ + sequence * 8 == documents_;
    return at_end ? size_ : load_le<std::int64_t>(pointers_ + sequence * 8) / width;
  };
  return {start_of(load_le<std::int64_t>(documents_ + index * 8)),
          start_of(load_le<std::int64_t>(documents_ + (index + 1) * 8))};
}

void TokenFile::read(std::int64_t begin, std::span<std::int64_t> out) const {
  const auto count = static_cast<std::int64_t>(out.size());
  if (begin < 0 || count > size_ || begin > size_ - count) {
    throw DataError(fmt::format("{}: {} tokens from {} on asked for: the file has {}", path_, count, begin, size_));
  }
  const std::int64_t width = data::bytes_of(type_);
  constexpr std::int64_t kPage = 4096;
  if (is_read_at_random(mapping_->ids.size()) && count * width > kPage) {
    mapping_->ids.will_need({ids_ + begin * width, static_cast<std::size_t>(count * width)});
  }
  widen(type_, ids_ + begin * width, out);
  const std::int64_t end = ids_end();
  if (end == 0) return;
  // Unsigned, so that a negative id is also too large. The maximum comes first, because the compiler vectorises it.
  std::uint64_t largest = 0;
  for (const std::int64_t id : out) largest = std::max(largest, static_cast<std::uint64_t>(id));
  if (largest < static_cast<std::uint64_t>(end)) return;
  const auto bad = std::find_if(out.begin(), out.end(), [&](std::int64_t id) { return id < 0 || id >= end; });
  if (end != vocab_size_) {
    throw DataError(fmt::format(
        "{}: token {} at position {}, but {} says that its vocabulary has {} ids: it describes another file; "
        "remove it, or make both again by `phalanx tokenize`",
        path_, *bad, begin + (bad - out.begin()), sidecar_path(path_), end));
  }
  std::string hint;
  if (format_ == TokenFormat::raw) {
    const std::string fitting = types_that_fit(mapping_->ids.bytes(), vocab_size_, type_);
    hint = fmt::format(" (read as raw {} ids: {})", to_string(type_),
                       fitting.empty() ? "is it another kind of file?"
                                       : fmt::format("the ids fit if they are {}: state the type by [training] "
                                                     "dataset_dtype, or as \"type\" in {}",
                                                     fitting, sidecar_path(path_)));
  }
  throw DataError(
      fmt::format("{}: token {} at position {} is outside the vocabulary: expected 0 to {}; the file was made "
                  "with another tokenizer, or vocab_size is too small{}",
                  path_, *bad, begin + (bad - out.begin()), vocab_size_ - 1, hint));
}

std::int64_t TokenFile::file_bytes() const { return static_cast<std::int64_t>(mapping_->ids.size()); }

std::string TokenFile::content_hash() const {
  return hash_of_ids(type_, {ids_, static_cast<std::size_t>(size_ * data::bytes_of(type_))});
}

std::string TokenFile::index_hash() const {
  if (mapping_->index.size() == 0) return "";
  return ContentHash().add_bytes(mapping_->index.bytes()).hex();
}

std::string TokenFile::description() const {
  std::string count = fmt::format("{}", size_);
  for (auto at = static_cast<std::ptrdiff_t>(count.size()) - 3; at > 0; at -= 3) count.insert(count.begin() + at, ',');
  std::string text = fmt::format("{}: {}, {}, {} tokens", path_, to_string(format_), to_string(type_), count);
  if (documents_) text += fmt::format(", {} document{}", document_count_, document_count_ == 1 ? "" : "s");
  if (mask_) text += ", of which a mask says which are trained";
  return text;
}

TrainValidationRanges split_validation(std::int64_t size, double fraction) {
  if (!(fraction >= 0.0 && fraction < 1.0)) {
    throw ConfigError(fmt::format("the validation fraction is {}: expected 0 or more and less than 1", fraction));
  }
  const auto validation = static_cast<std::int64_t>(static_cast<double>(size) * fraction);
  if (size <= 0 || (fraction > 0.0 && validation == 0)) {
    throw ConfigError(
        fmt::format("a validation fraction of {} of {} tokens leaves no token for validation", fraction, size));
  }
  return {{0, size - validation}, {size - validation, size}};
}

}  // namespace phalanx::data
