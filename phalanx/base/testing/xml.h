// A small XML parser for tests: elements with their attributes and text. A document that is not well-formed is an Error
// that says where. Comments, CDATA, declarations and processing instructions are not supported, since the program's
// pictures have none.
//
//   const XmlElement svg = parse_xml(picture);
//   for (const XmlElement* box : elements_of(svg, "rect")) sum += box->number("width");
#pragma once

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "phalanx/base/error.h"

namespace phalanx {

struct XmlElement {
  std::string name;
  std::map<std::string, std::string> attributes;
  std::string text;  // this element's own text, without that of its children; entities are resolved
  std::vector<XmlElement> children;

  double number(const std::string& attribute) const { return std::stod(attributes.at(attribute)); }
};

/// All elements of that name, in the order of the document.
inline std::vector<const XmlElement*> elements_of(const XmlElement& root, std::string_view name) {
  std::vector<const XmlElement*> found;
  if (root.name == name) found.push_back(&root);
  for (const XmlElement& child : root.children) {
    const auto below = elements_of(child, name);
    found.insert(found.end(), below.begin(), below.end());
  }
  return found;
}

std::vector<const XmlElement*> elements_of(const XmlElement&& root, std::string_view name) = delete;  // they lie in it

class XmlReader {
 public:
  explicit XmlReader(std::string_view text) : text_(text) {}

  XmlElement document() {
    skip_blanks();
    XmlElement root = element();
    skip_blanks();
    if (at_ != text_.size()) fail("text behind the root element");
    return root;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error("XML, byte " + std::to_string(at_) + ": " + what + " at '" + std::string(text_.substr(at_, 40)) + "'");
  }
  bool next_is(std::string_view text) const { return text_.substr(at_).starts_with(text); }
  void expect(std::string_view text) {
    if (!next_is(text)) fail("expected '" + std::string(text) + "'");
    at_ += text.size();
  }
  void skip_blanks() { at_ = std::min(text_.size(), text_.find_first_not_of(" \n\t\r", at_)); }

  std::string name() {
    const std::size_t begin = at_;
    while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) != 0 || next_is("-") ||
                                  next_is(":") || next_is("_"))) {
      ++at_;
    }
    if (at_ == begin) fail("expected a name");
    return std::string(text_.substr(begin, at_ - begin));
  }

  /// Reads up to `end`, which is not consumed.
  std::string characters(char end) {
    static const std::map<std::string, char, std::less<>> kEntities = {
        {"&amp;", '&'}, {"&lt;", '<'}, {"&gt;", '>'}, {"&quot;", '"'}, {"&#39;", '\''}};
    std::string out;
    while (at_ < text_.size() && text_[at_] != end) {
      if (next_is("<")) fail("'<' is not escaped");
      if (static_cast<unsigned char>(text_[at_]) < 0x20 && text_[at_] != '\n' && text_[at_] != '\t') {
        fail("a control character");
      }
      if (next_is("&")) {
        const std::size_t close = text_.find(';', at_);
        if (close == std::string_view::npos) fail("'&' is not escaped");
        const auto known = kEntities.find(text_.substr(at_, close + 1 - at_));
        if (known == kEntities.end()) fail("no such entity");
        out += known->second;
        at_ = close + 1;
      } else {
        out += text_[at_++];
      }
    }
    return out;
  }

  XmlElement element() {
    expect("<");
    XmlElement element{.name = name(), .attributes = {}, .text = {}, .children = {}};
    while (true) {
      const std::size_t before = at_;
      skip_blanks();
      if (next_is("/>")) {
        at_ += 2;
        return element;
      }
      if (next_is(">")) break;
      if (at_ == before) fail("expected a blank before an attribute");
      const std::string attribute = name();
      expect("=\"");
      if (!element.attributes.emplace(attribute, characters('"')).second) fail(attribute + " is there twice");
      expect("\"");
    }
    expect(">");
    while (true) {
      element.text += characters('<');
      if (at_ == text_.size()) fail("<" + element.name + "> is not closed");
      if (next_is("</")) break;
      element.children.push_back(this->element());
    }
    expect("</" + element.name + ">");
    return element;
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

inline XmlElement parse_xml(std::string_view text) { return XmlReader(text).document(); }

}  // namespace phalanx
