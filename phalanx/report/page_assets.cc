#include "phalanx/report/page_assets.h"

#include <fmt/format.h>

#include <cstdint>

namespace phalanx::report {
namespace {

std::uint32_t hex_digit(char digit) {
  return static_cast<std::uint32_t>(digit <= '9' ? digit - '0' : digit - 'a' + 10);
}

}  // namespace

std::string policy_hash(std::string_view hexadecimal) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string base64;
  std::uint32_t bits = 0;
  int count = 0;  // of bits that wait
  for (const char digit : hexadecimal) {
    bits = bits << 4 | hex_digit(digit);
    count += 4;
    if (count < 6) continue;
    count -= 6;
    base64 += kDigits[bits >> count & 63];
  }
  if (count > 0) base64 += kDigits[bits << (6 - count) & 63];
  base64.append((4 - base64.size() % 4) % 4, '=');
  return fmt::format("'sha256-{}'", base64);
}

std::string content_security_policy() {
  return fmt::format(
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src {} {}; style-src {} {}; "
      "base-uri 'none'; form-action 'none'\">",
      policy_hash(kUplotScript.sha256), policy_hash(kReportScript.sha256), policy_hash(kUplotStyle.sha256),
      policy_hash(kReportStyle.sha256));
}

std::string json_for_script(std::string json) {
  for (std::size_t at = json.find('<'); at != std::string::npos; at = json.find('<', at))
    json.replace(at, 1, "\\u003c");
  return json;
}

}  // namespace phalanx::report
