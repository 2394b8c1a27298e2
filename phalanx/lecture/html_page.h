// The lecture as one HTML file, which loads nothing: the sections' Markdown, their pictures, a table of contents,
// light and dark colours.
#pragma once

#include <string>
#include <vector>

#include "phalanx/lecture/lecture.h"

namespace phalanx::lecture {

std::string html_page(const std::vector<WrittenSection>& written);

/// The Markdown that the lecture uses: headings, paragraphs, lists, tables, fenced code, and in a line `code`,
/// **strong** and links. A link that is no address of the web becomes its text. The fence "```picture I" stands for
/// pictures[I]; throws Error if there is none.
std::string html_of_markdown(const std::string& markdown, const std::vector<std::vector<Picture>>& pictures = {});

}  // namespace phalanx::lecture
