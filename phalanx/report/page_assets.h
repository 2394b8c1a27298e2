// The scripts and styles of the report page, as the build embeds them (cmake/PhalanxEmbed.cmake), and the policy that
// lets a browser run these and nothing else.
#pragma once

#include <string>
#include <string_view>

namespace phalanx::report {

struct EmbeddedText {
  std::string_view text;
  std::string_view sha256;  // in hexadecimal
};

extern const EmbeddedText kUplotScript, kUplotStyle, kUplotLicense;  // third_party/uplot
extern const EmbeddedText kReportScript, kReportStyle;               // page/

/// The <meta> of a Content-Security-Policy: the four embedded texts may run, each known by its digest. Nothing is
/// loaded, sent, framed or evaluated.
std::string content_security_policy();

/// "'sha256-47DEQpj8...='" of a digest in hexadecimal.
std::string policy_hash(std::string_view hexadecimal);

/// Text for a <script> block that holds JSON: no "<", so nothing in it ends the block or begins a comment.
std::string json_for_script(std::string json);

}  // namespace phalanx::report
