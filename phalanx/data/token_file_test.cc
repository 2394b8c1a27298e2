#include "phalanx/data/token_file.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/file.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/faulty_file_system.h"
#include "phalanx/base/testing/folder_test.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/data/token_file_writer.h"

namespace phalanx::data {
namespace {

template <typename T>
std::string packed(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

template <typename T>
void poke(std::string& bytes, std::size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

std::vector<std::int64_t> all_of(const TokenFile& file) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(file.size()));
  file.read(0, ids);
  return ids;
}

class TokenFileTest : public FolderTest {
 protected:
  std::string error_of(const std::string& file, TokenFileOptions options = {}) {
    return error_text([&] { TokenFile opened(file, options); });
  }
  std::string llmc(std::int32_t magic, std::int32_t version, std::int32_t count, const std::string& ids) {
    std::vector<std::int32_t> header(256, 0);
    header[0] = magic, header[1] = version, header[2] = count;
    return packed(header) + ids;
  }
  /// Two documents, 1 2 3 and 4 5, under PREFIX m.
  void write_small() {
    TokenFileWriter writer(path("m"), {.vocab_size = 100});
    writer.add_document(std::vector<std::int32_t>{1, 2, 3});
    writer.add_document(std::vector<std::int32_t>{4, 5});
    writer.finish();
  }
};

TEST_F(TokenFileTest, MegatronRoundTripWithDocuments) {
  for (const std::int64_t vocab : {300, 65500, 65501, 200000}) {
    const std::string prefix = path("v" + std::to_string(vocab));
    TokenFileWriter writer(prefix, {.vocab_size = vocab});
    std::vector<std::int32_t> first(1000);
    std::iota(first.begin(), first.end(), static_cast<std::int32_t>(vocab - 1000 > 0 ? vocab - 1000 : 0));
    if (vocab < 1000) first.resize(300);
    writer.append(std::span(first).first(100));  // a document in pieces
    writer.append(std::span(first).subspan(100));
    writer.end_document();
    writer.end_document();  // an empty one
    writer.add_document(std::vector<std::int32_t>{7});
    writer.append(std::vector<std::int32_t>{8, 9});  // ended by finish()
    writer.finish();

    for (const std::string& name : {prefix, prefix + ".bin", prefix + ".idx"}) {
      const TokenFile file(name, {.vocab_size = vocab});
      EXPECT_EQ(file.format(), TokenFormat::megatron);
      EXPECT_EQ(file.type(), vocab <= 65500 ? TokenType::u16 : TokenType::i32);
      std::vector<std::int64_t> expected(first.begin(), first.end());
      const auto n = static_cast<std::int64_t>(first.size());
      expected.insert(expected.end(), {7, 8, 9});
      EXPECT_EQ(all_of(file), expected);
      ASSERT_EQ(file.document_count(), 4);
      EXPECT_EQ(file.document(0), (TokenRange{0, n}));
      EXPECT_EQ(file.document(1), (TokenRange{n, n}));
      EXPECT_EQ(file.document(2), (TokenRange{n, n + 1}));
      EXPECT_EQ(file.document(3), (TokenRange{n + 1, n + 3}));
      EXPECT_THROW(file.document(4), DataError);
    }
  }
}

TEST_F(TokenFileTest, MegatronBytesAreTheFormats) {
  write_small();
  EXPECT_EQ(read_file(path("m.bin")), packed<std::uint16_t>({1, 2, 3, 4, 5}));
  std::string expected("MMIDIDX\0\0", 9);
  expected += packed<std::uint64_t>({1}) + std::string(1, '\x08') + packed<std::uint64_t>({2, 3});
  expected += packed<std::int32_t>({3, 2}) + packed<std::int64_t>({0, 6}) + packed<std::int64_t>({0, 1, 2});
  EXPECT_EQ(read_file(path("m.idx")), expected);
  EXPECT_THAT(TokenFile(path("m")).description(), AllOf(HasSubstr("m.bin: Megatron, uint16, 5 tokens, 2 documents")));
  // One int8 a sequence at the end (modes of multimodal data) is allowed.
  write("m.idx", expected + std::string(2, '\0'));
  EXPECT_EQ(TokenFile(path("m")).size(), 5);
}

TEST_F(TokenFileTest, EveryIntegerTypeOfMegatronIsRead) {
  const auto file_of = [&](int code, const std::string& ids, int width) {
    const auto count = static_cast<std::int32_t>(ids.size() / width);
    std::string index("MMIDIDX\0\0", 9);
    index += packed<std::uint64_t>({1}) + std::string(1, static_cast<char>(code)) + packed<std::uint64_t>({1, 2});
    index += packed<std::int32_t>({count}) + packed<std::int64_t>({0}) + packed<std::int64_t>({0, 1});
    write("t.idx", index);
    write("t.bin", ids);
    return TokenFile(path("t"));
  };
  const std::vector<std::int64_t> small{3, 100};
  EXPECT_EQ(all_of(file_of(1, packed<std::uint8_t>({3, 100}), 1)), small);
  EXPECT_EQ(all_of(file_of(2, packed<std::int8_t>({3, 100}), 1)), small);
  EXPECT_EQ(all_of(file_of(3, packed<std::int16_t>({3, 100}), 2)), small);
  EXPECT_EQ(all_of(file_of(4, packed<std::int32_t>({3, 100}), 4)), small);
  EXPECT_EQ(all_of(file_of(5, packed<std::int64_t>({3, 100}), 8)), small);
  EXPECT_EQ(all_of(file_of(8, packed<std::uint16_t>({3, 65535}), 2)), (std::vector<std::int64_t>{3, 65535}));
  EXPECT_EQ(file_of(4, packed<std::int32_t>({3, 100}), 4).type(), TokenType::i32);
  EXPECT_THROW(file_of(6, packed<double>({3, 100}), 8), DataError);
  EXPECT_THROW(file_of(7, packed<float>({3, 100}), 4), DataError);
  EXPECT_THROW(file_of(0, packed<float>({3, 100}), 4), DataError);
  EXPECT_THROW(file_of(9, packed<float>({3, 100}), 4), DataError);
}

TEST_F(TokenFileTest, RawAndLlmcFilesAreRecognised) {
  write("raw.bin", packed<std::uint16_t>({5, 6, 65535}));
  const TokenFile raw(path("raw.bin"));
  EXPECT_EQ(raw.format(), TokenFormat::raw);
  EXPECT_EQ(all_of(raw), (std::vector<std::int64_t>{5, 6, 65535}));
  EXPECT_EQ(raw.document_count(), 1);
  EXPECT_EQ(raw.document(0), (TokenRange{0, 3}));

  write("wide.tokens", packed<std::uint32_t>({5, 100000}));
  const TokenFile wide(path("wide.tokens"), {.vocab_size = 128256});
  EXPECT_EQ(wide.type(), TokenType::u32);
  EXPECT_EQ(all_of(wide), (std::vector<std::int64_t>{5, 100000}));

  write("gpt2.bin", llmc(20240520, 1, 3, packed<std::uint16_t>({1, 2, 50256})));
  const TokenFile gpt2(path("gpt2.bin"), {.vocab_size = 50257});
  EXPECT_EQ(gpt2.format(), TokenFormat::llmc);
  EXPECT_EQ(all_of(gpt2), (std::vector<std::int64_t>{1, 2, 50256}));

  write("llama.bin", llmc(20240801, 7, 2, packed<std::uint32_t>({1, 128000})));
  const TokenFile llama(path("llama.bin"));
  EXPECT_EQ(llama.type(), TokenType::u32);
  EXPECT_EQ(all_of(llama), (std::vector<std::int64_t>{1, 128000}));

  // Asked for by name, the header is not looked at.
  EXPECT_EQ(TokenFile(path("gpt2.bin"), {.format = TokenFormat::raw}).size(), 512 + 3);
  EXPECT_THAT(error_of(path("raw.bin"), {.format = TokenFormat::llmc}),
              HasSubstr("truncated: expected llm.c's header"));
  EXPECT_THAT(error_of(path("raw.bin"), {.format = TokenFormat::megatron}), HasSubstr("raw.idx"));
}

TEST_F(TokenFileTest, MalformedFilesAreRefusedWithFileExpectedAndFound) {
  write_small();
  const std::string good = read_file(path("m.idx"));
  struct Case {
    std::string name;
    std::function<void(std::string&)> damage;
    std::string message;
  };
  const std::vector<Case> cases = {
      {"empty index", [](std::string& b) { b.clear(); }, "m.idx: truncated: expected a header of 34 bytes, found 0"},
      {"short header", [](std::string& b) { b.resize(20); }, "found 20 bytes"},
      {"wrong magic", [](std::string& b) { b[0] = 'X'; }, "wrong magic: expected MMIDIDX"},
      {"wrong version", [](std::string& b) { poke<std::uint64_t>(b, 9, 3); }, "version is 3: expected 1"},
      {"float dtype", [](std::string& b) { b[17] = 7; }, "dtype code is 7"},
      {"too many sequences", [](std::string& b) { poke<std::uint64_t>(b, 18, 3); }, "3 sequences"},
      {"hostile count", [](std::string& b) { poke<std::uint64_t>(b, 18, ~0ull / 12); }, "too many for the"},
      {"hostile documents", [](std::string& b) { poke<std::uint64_t>(b, 26, ~0ull / 8 + 1); }, "too many for the"},
      {"truncated arrays", [](std::string& b) { b.pop_back(); }, "too many for the"},
      {"trailing bytes", [](std::string& b) { b += "xyz"; }, "expected 82 bytes"},
      {"no sequence",
       [](std::string& b) { b.resize(34), poke<std::uint64_t>(b, 18, 0), poke<std::uint64_t>(b, 26, 0); },
       "holds no sequence"},
      {"negative length", [](std::string& b) { poke<std::int32_t>(b, 34, -3); }, "sequence 0 has length -3"},
      {"length beyond the file", [](std::string& b) { poke<std::int32_t>(b, 38, 9); },
       "m.bin: truncated: its index says that sequence 1 ends at byte 24, the file has 10"},
      {"length short of the file", [](std::string& b) { poke<std::int32_t>(b, 38, 1); },
       "expected 8 bytes by its index"},
      {"pointer astray", [](std::string& b) { poke<std::int64_t>(b, 50, 1 << 20); },
       "sequence 1 begins at byte 1048576"},
      {"negative pointer", [](std::string& b) { poke<std::int64_t>(b, 42, -8); }, "sequence 0 begins at byte -8"},
      {"document bound astray", [](std::string& b) { poke<std::int64_t>(b, 66, 5); }, "document bound 1 is 5"},
      {"document bounds descend", [](std::string& b) { poke<std::int64_t>(b, 58, 1); }, "document bound 0 is 1"},
      {"documents end early", [](std::string& b) { poke<std::int64_t>(b, 74, 1); }, "last document ends at sequence 1"},
  };
  for (const Case& test : cases) {
    std::string bytes = good;
    test.damage(bytes);
    write("m.idx", bytes);
    EXPECT_THAT(error_of(path("m")), AllOf(HasSubstr(path("m")), HasSubstr(test.message))) << test.name;
  }
  write("m.idx", good);
  write("m.bin", "12345");
  EXPECT_THAT(error_of(path("m")), HasSubstr("m.bin: truncated"));
  std::filesystem::remove(path("m.bin"));
  EXPECT_THAT(error_of(path("m.idx")), HasSubstr("m.bin: no such file: a Megatron index needs its ids"));

  write("x.bin", "");
  EXPECT_THAT(error_of(path("x.bin")), HasSubstr("x.bin: the file is empty"));
  EXPECT_THAT(error_of(path("x")), HasSubstr("has no index"));
  write("x.bin", "abc");
  EXPECT_THAT(error_of(path("x.bin")), HasSubstr("3 bytes are no whole number of uint16 ids"));
  write("x.bin", "abcdef");
  EXPECT_THAT(error_of(path("x.bin"), {.vocab_size = 100000}), HasSubstr("no whole number of uint32 ids"));
  write("x.bin", good + "x");
  EXPECT_THAT(error_of(path("x.bin")), HasSubstr("this is a Megatron index"));
  write("x.bin", llmc(20240520, 7, 2, "abcd"));
  EXPECT_THAT(error_of(path("x.bin")), HasSubstr("version is 7: expected 1"));
  write("x.bin", llmc(20240520, 1, 2, "abc"));
  EXPECT_THAT(error_of(path("x.bin")), HasSubstr("tells of 2 uint16 tokens, so of 1028 bytes: found 1027"));
  write("x.bin", llmc(20240801, 7, -2, "abcd"));
  EXPECT_THAT(error_of(path("x.bin")), HasSubstr("tells of -2 uint32 tokens"));
  write("x.bin", llmc(20240522, 1, 2, "abcd"));
  EXPECT_THAT(error_of(path("x.bin")), HasSubstr("multiple-choice evaluation file"));
  EXPECT_THAT(error_of(path("nowhere.bin")), HasSubstr("nowhere.bin: no such file: expected a token file"));
  EXPECT_THAT(error_of(path(".")), HasSubstr("is a directory: expected a token file"));
  EXPECT_THAT(error_of(folder()), HasSubstr("irectory"));
}

TEST_F(TokenFileTest, IdsOutsideTheVocabularyAreFoundOnOpeningAndOnReading) {
  write("t.bin", packed<std::uint16_t>({1, 2, 99, 3}));
  EXPECT_THAT(
      error_of(path("t.bin"), {.vocab_size = 99}),
      AllOf(HasSubstr("t.bin: token 99 at position 2"), HasSubstr("expected 0 to 98"), HasSubstr("raw uint16")));
  EXPECT_EQ(error_of(path("t.bin"), {.vocab_size = 100}), "");

  // Too large to be checked completely on opening: the sampled blocks find a bad file, read() finds a bad id anywhere.
  const std::int64_t count = (std::int64_t{1} << 24) + 4096;
  std::string bytes(static_cast<std::size_t>(count) * 2, '\0');
  for (std::size_t i = 0; i < bytes.size(); i += 2) bytes[i] = '\1';
  poke<std::uint16_t>(bytes, 5000 * 2, 77);
  write("large.bin", bytes);
  const TokenFile large(path("large.bin"), {.vocab_size = 50});
  std::vector<std::int64_t> ids(10);
  EXPECT_NO_THROW(large.read(4990, ids));
  EXPECT_THROW(large.read(4991, ids), DataError);
  std::fill(bytes.begin() + bytes.size() / 2, bytes.end(), '\x44');
  write("large.bin", bytes);
  EXPECT_THAT(error_of(path("large.bin"), {.vocab_size = 50}), HasSubstr("token 17476"));
  // Negative ids of signed types.
  write_small();
  TokenFileWriter writer(path("wide"), {.vocab_size = 100000});
  writer.add_document(std::vector<std::int32_t>{1});
  writer.finish();
  write("wide.bin", packed<std::int32_t>({-1}));
  std::filesystem::remove(path("wide.json"));
  EXPECT_THAT(error_of(path("wide"), {.vocab_size = 100000}), HasSubstr("token -1 at position 0"));
}

TEST_F(TokenFileTest, ReadsOutsideTheFileAreRefused) {
  write_small();
  const TokenFile file(path("m"));
  std::vector<std::int64_t> ids(3);
  EXPECT_NO_THROW(file.read(2, ids));
  EXPECT_EQ(ids, (std::vector<std::int64_t>{3, 4, 5}));
  EXPECT_THROW(file.read(3, ids), DataError);
  EXPECT_THROW(file.read(-1, ids), DataError);
  EXPECT_THAT(error_text<DataError>([&] { file.read(std::numeric_limits<std::int64_t>::max(), ids); }),
              HasSubstr("3 tokens from 9223372036854775807 on asked for: the file has 5"));
}

TEST_F(TokenFileTest, WriterLeavesNothingUntilFinishAndOldFilesUntilThen) {
  write_small();
  const std::string before = read_file(path("m.bin"));
  {
    TokenFileWriter writer(path("m"), {.vocab_size = 100});
    writer.add_document(std::vector<std::int32_t>(100000, 9));
  }
  EXPECT_EQ(read_file(path("m.bin")), before);
  EXPECT_EQ(TokenFile(path("m")).size(), 5);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder()), {}), 3);
}

TEST_F(TokenFileTest, WriterErrors) {
  EXPECT_THROW(TokenFileWriter(path("no/such/directory/m"), {.vocab_size = 10}), FileError);
  EXPECT_THROW(TokenFileWriter(path("m"), {}), ConfigError);
  TokenFileWriter writer(path("m"), {.vocab_size = 10});
  EXPECT_THROW(writer.add_document(std::vector<std::int32_t>{10}), DataError);
  EXPECT_THROW(writer.add_document(std::vector<std::int32_t>{-1}), DataError);
  writer.add_document(std::vector<std::int32_t>{9});
  writer.finish();
  EXPECT_THROW(writer.finish(), DataError);
  EXPECT_THROW(writer.append(std::vector<std::int32_t>{1}), DataError);
}

class FailingTokenFileTest : public TokenFileTest, public ::testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(, FailingTokenFileTest, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "WithAMask" : "WithoutAMask"; });

TEST_P(FailingTokenFileTest, AFailureAtAnyOperationLosesNothing) {
  const std::vector<std::int64_t> old_ids{1, 2, 3, 4, 5}, new_ids(1000, 7);
  const auto write_new = [&](FileSystem& fs) {
    TokenFileWriter writer(path("m"), {.vocab_size = 100, .file_system = &fs, .has_mask = GetParam()});
    const std::vector<std::int32_t> ids(1000, 7);
    GetParam() ? writer.add_document(ids, std::vector<std::uint8_t>(1000, 1)) : writer.add_document(ids);
    writer.finish();
  };
  write_small();
  FaultyFileSystem counting(posix_file_system());
  write_new(counting);
  const std::int64_t operations = counting.operations();
  ASSERT_GE(operations, 9);
  int refused = 0;
  for (const Fault kind : {Fault::error, Fault::full, Fault::crash}) {
    for (std::int64_t n = 0; n < operations; ++n) {
      write_small();
      FaultyFileSystem fs(posix_file_system(), {.fail_at = n, .kind = kind});
      if (kind == Fault::crash) {
        EXPECT_THROW(write_new(fs), SimulatedCrash);
      } else if (kind == Fault::error) {
        EXPECT_THROW(write_new(fs), FileError);
      } else {
        try {  // a disk that fills after the last write does no harm
          write_new(fs);
        } catch (const FileError&) {
        }
      }
      try {
        const auto found = all_of(TokenFile(path("m")));
        EXPECT_TRUE(found == old_ids || found == new_ids) << "operation " << n;
      } catch (const DataError&) {
        ++refused;  // between the renames
      }
      if (kind != Fault::crash) {
        EXPECT_FALSE(std::filesystem::exists(path("m.bin.tmp"))) << "operation " << n;
        EXPECT_FALSE(std::filesystem::exists(path("m.idx.tmp"))) << "operation " << n;
        EXPECT_FALSE(std::filesystem::exists(path("m.json.tmp"))) << "operation " << n;
        EXPECT_FALSE(std::filesystem::exists(path("m.mask.tmp"))) << "operation " << n;
      }
    }
  }
  // Between two of three or four renames, once by an error and once by a crash.
  EXPECT_EQ(refused, GetParam() ? 6 : 4);
}

}  // namespace
}  // namespace phalanx::data
