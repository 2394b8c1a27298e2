#include "phalanx/report/page_assets.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <openssl/sha.h>

#include <array>
#include <nlohmann/json.hpp>

#include "phalanx/base/testing/matchers.h"

namespace phalanx::report {
namespace {

std::string sha256(std::string_view text) {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest{};
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  std::string hexadecimal;
  for (const unsigned char byte : digest) hexadecimal += fmt::format("{:02x}", byte);
  return hexadecimal;
}

// If the digests are not of these very bytes, a browser shows the page without charts and without a word.
TEST(PageAssets, DigestsAreOfTheEmbeddedTexts) {
  for (const EmbeddedText* asset : {&kUplotScript, &kUplotStyle, &kUplotLicense, &kReportScript, &kReportStyle}) {
    EXPECT_GT(asset->text.size(), 100U);
    EXPECT_EQ(asset->sha256, sha256(asset->text)) << asset->text.substr(0, 60);
    EXPECT_THAT(std::string(asset->text), Not(HasSubstr("\r")));  // a parser of HTML would change it
    EXPECT_THAT(std::string(asset->text), Not(HasSubstr("</s")));
    EXPECT_THAT(std::string(asset->text), Not(HasSubstr("<!--")));
  }
  EXPECT_THAT(std::string(kUplotLicense.text), Not(HasSubstr("--")));  // it stands in a comment
}

TEST(PageAssets, PolicyLetsTheEmbeddedTextsRunAlone) {
  EXPECT_EQ(policy_hash(sha256("")), "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='");
  const std::string policy = content_security_policy();
  EXPECT_THAT(policy, HasSubstr("default-src 'none'; script-src 'sha256-"));
  for (const EmbeddedText* asset : {&kUplotScript, &kUplotStyle, &kReportScript, &kReportStyle}) {
    EXPECT_THAT(policy, HasSubstr(policy_hash(asset->sha256)));
  }
  EXPECT_THAT(policy, Not(HasSubstr("unsafe")));
}

TEST(PageAssets, JsonInAScriptBlockCannotEndIt) {
  const std::string hostile = "</script><!--<script>&\xe2\x80\xa8";
  const std::string text = json_for_script(nlohmann::json(hostile).dump());
  EXPECT_THAT(text, Not(HasSubstr("<")));
  EXPECT_EQ(nlohmann::json::parse(text), hostile);
}

}  // namespace
}  // namespace phalanx::report
