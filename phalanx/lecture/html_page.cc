#include "phalanx/lecture/html_page.h"

#include <fmt/format.h>

#include <regex>
#include <sstream>

#include "phalanx/base/error.h"
#include "phalanx/base/svg.h"

namespace phalanx::lecture {
namespace {

std::string inline_html(const std::string& text) {
  static const std::regex code("`([^`]+)`"), strong(R"(\*\*([^*]+)\*\*)"),
      web_link(R"(\[([^\]]+)\]\((https?://[^)]+)\))"), other_link(R"(\[([^\]]+)\]\([^)]*\))");
  std::string html = std::regex_replace(escape_markup(text), code, "<code>$1</code>");
  html = std::regex_replace(html, strong, "<strong>$1</strong>");
  html = std::regex_replace(html, web_link, R"(<a href="$2">$1</a>)");
  return std::regex_replace(html, other_link, "$1");
}

std::vector<std::string> cells_of(const std::string& row) {
  std::vector<std::string> cells;
  std::istringstream in(row.substr(1));
  for (std::string cell; std::getline(in, cell, '|');) {
    const std::size_t first = cell.find_first_not_of(' ');
    cells.push_back(first == std::string::npos ? "" : cell.substr(first, cell.find_last_not_of(' ') + 1 - first));
  }
  return cells;
}

/// The open block, and how it is closed.
class Writer {
 public:
  explicit Writer(const std::vector<std::vector<Picture>>& pictures) : pictures_(pictures) {}

  void line(const std::string& line) {
    if (line.starts_with("```picture ")) {
      show(line.substr(line.find(' ') + 1));
      in_code_ = true;  // up to the fence that closes it, with nothing between
    } else if (line.starts_with("```")) {
      in_code_ ? close() : open("<pre tabindex=0>", "</pre>\n");
      in_code_ = !in_code_;
    } else if (in_code_) {
      html_ += escape_markup(line) + "\n";
    } else if (line.empty()) {
      close();
    } else if (line.starts_with("#")) {
      heading(line);
    } else if (line.starts_with("|")) {
      row(line);
    } else if (line.starts_with("- ")) {
      if (block_ != "</ul>\n") open("<ul>", "</ul>\n");
      html_ += "<li>" + inline_html(line.substr(2)) + "\n";
    } else {
      if (block_.empty()) open("<p>", "</p>\n");
      html_ += inline_html(line) + "\n";
    }
  }
  std::string finish() { return close(), html_; }

 private:
  void show(const std::string& number) {
    const auto index = static_cast<std::size_t>(std::stoul(number));
    if (index >= pictures_.size()) throw Error(fmt::format("the lecture has no picture {}", number));
    open("<div class=pictures>", "</div>\n");
    for (const Picture& picture : pictures_[index]) html_ += picture.svg();
  }
  void open(const char* begin, const char* end) {
    close();
    html_ += begin;
    block_ = end;
  }
  void close() {
    html_ += block_;
    block_.clear();
    rows_ = 0;
  }
  void heading(const std::string& line) {
    close();
    const std::size_t level = line.find(' ');
    html_ += fmt::format("<h{0}>{1}</h{0}>\n", level, inline_html(line.substr(level + 1)));
  }
  void row(const std::string& line) {
    if (block_.empty() || rows_ == 0) open("<div class=scroll><table>", "</table></div>\n");
    const auto cells = cells_of(line);
    ++rows_;
    if (rows_ == 2) return;  // the line between head and body
    const char* tag = rows_ == 1 ? "th" : "td";
    html_ += "<tr>";
    for (const std::string& cell : cells) html_ += fmt::format("<{0}>{1}</{0}>", tag, inline_html(cell));
    html_ += "</tr>\n";
  }

  const std::vector<std::vector<Picture>>& pictures_;
  std::string html_, block_;
  bool in_code_ = false;
  int rows_ = 0;
};

constexpr std::string_view kStyle = R"css(
:root{--page:#f5f6f8;--card:#fff;--line:#e1e5ea;--text:#1b2430;--muted:#566171;--accent:#1d4ed8;--t0:#d6e4ff;
--t1:#d3f0dc;--t2:#ffe3c4;--t3:#ecdcfa;--sum:#fff3a8;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--page:#0e1318;--card:#171d25;--line:#2c3541;--text:#e7ebf0;--muted:#a0acba;
--accent:#8ab4ff;
--t0:#1f3a6b;--t1:#1d4a31;--t2:#5c3a14;--t3:#43295f;--sum:#56500f}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);
font:16px/1.6 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 20px 64px}
h1{font-size:28px;line-height:1.25;margin:40px 0 8px}main>.defs+h1{margin-top:0}
h2{font-size:22px;margin:0 0 8px}h3{font-size:16px;margin:20px 0 4px}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:20px 24px;margin:20px 0;
min-width:0}
p,ul{margin:10px 0;max-width:75ch;overflow-wrap:break-word}ul{padding-left:22px}
a{color:var(--accent)}nav a{text-decoration:none}nav ol{columns:2;column-gap:32px;padding-left:24px;margin:8px 0}
pre,.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:8px;margin:12px 0}
pre{background:var(--page);padding:12px 14px;
font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
code{font:.9em ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;background:var(--page);
border-radius:4px;padding:1px 4px}
table{border-collapse:collapse;font-size:14px;line-height:1.4;width:100%}
th,td{padding:6px 10px;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
tr:last-child td{border-bottom:0}
th{color:var(--muted);font-weight:600}
.pictures{display:flex;flex-wrap:wrap;gap:18px 36px;overflow-x:auto;margin:14px 0;padding:2px 0}
svg{width:var(--w);flex:none;font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
svg text{fill:var(--text)}svg .title{font-weight:700}svg rect{stroke:var(--muted);stroke-width:.8;fill:none}
svg .t0{fill:var(--t0)}svg .t1{fill:var(--t1)}svg .t2{fill:var(--t2)}svg .t3{fill:var(--t3)}
svg .sum{fill:var(--sum)}svg .plain{fill:var(--page)}svg .wait{stroke-dasharray:2 2}
.arrow{stroke:var(--accent);stroke-width:1.5;fill:none}#head path{fill:var(--accent)}.defs{position:absolute}
@media(max-width:600px){svg{width:calc(var(--w)*.88)}main{padding:16px 10px 40px}section{padding:14px 12px}
nav ol{columns:1}h1{font-size:23px}pre{font-size:11.5px}}
)css";

}  // namespace

std::string html_of_markdown(const std::string& markdown, const std::vector<std::vector<Picture>>& pictures) {
  Writer writer(pictures);
  std::istringstream in(markdown);
  for (std::string line; std::getline(in, line);) writer.line(line);
  return writer.finish();
}

std::string html_page(const std::vector<WrittenSection>& written) {
  std::string contents, body;
  int part = 0;
  for (const WrittenSection& section : written) {
    if (section.section->part != part) {
      part = section.section->part;
      body += fmt::format("<h1>{}</h1>\n", part_title(*section.section));
    }
    const auto id = section.section->id;
    contents += fmt::format("<li><a href=\"#{}\">{}</a>\n", id, escape_markup(section.section->title()));
    body += fmt::format("<section id=\"{}\">\n{}</section>\n", id,
                        html_of_markdown(section.picture_markdown, section.pictures));
  }
  return fmt::format(
      "<!doctype html>\n<html lang=en><head><meta charset=utf-8>\n"
      "<meta name=viewport content=\"width=device-width,initial-scale=1\">\n"
      "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
      "<title>Distributed training: a lecture that runs</title>\n<style>{}</style></head>\n<body><main>\n"
      "<svg class=defs width=0 height=0 aria-hidden=true><defs><marker id=head viewBox=\"0 0 8 8\" refX=7 refY=4 "
      "markerWidth=6 markerHeight=6 orient=auto><path d=\"M0 0L8 4L0 8z\"/></marker></defs></svg>\n"
      "{}<nav><ol>\n{}</ol></nav>\n{}</main></body></html>\n",
      kStyle, html_of_markdown(opening()), contents, body);
}

}  // namespace phalanx::lecture
