// Finds the text of a record of JSON lines, without building the whole record (simdjson, arXiv:1902.08318).
//
//   RecordText texts("text");
//   std::string line = R"({"text": "One document.", "id": 7})";
//   texts.find(line);                                            // One document.
//
// It takes what is certain. Whatever else there is in a line, such as a fault, a null or a key that is there twice, is
// left to the caller's own parser, which has the messages. So what is found is what json_text.h finds.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace phalanx::data {

class RecordText {
 public:
  /// `field`: a key of the record; "a.b" is key b of the object a, unless the record has a key "a.b".
  explicit RecordText(std::string field);
  ~RecordText();
  RecordText(const RecordText&) = delete;
  RecordText& operator=(const RecordText&) = delete;

  /// The text in `line`, which may get more capacity, but keeps its content. Nothing: parse the line another way. The
  /// result is valid until the next call.
  std::optional<std::string_view> find(std::string& line);

 private:
  struct Parser;
  std::string field_;
  std::unique_ptr<Parser> parser_;
};

}  // namespace phalanx::data
