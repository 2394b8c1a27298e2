// Translates a regular expression of the `tokenizers` package to PCRE2, so that it matches the same. The package's
// engine is Oniguruma with Ruby's syntax.
//
// Translated:
// - \w and \s with their Unicode classes, scripts (\p{Han} is of characters, not of script extensions), \v, \u3042,
//   (?m) (the dot matches a newline), POSIX brackets;
// - (?i) in the middle of a group, which holds for all that follows, across |;
// - quantifiers: in a{2,3}+ and a{2}? the second sign is a separate quantifier, a{,3} is a{0,3}, and what is not an
//   interval is text.
// Refused, by a DataError that names it: everything else that has another meaning in PCRE2.
// - Sets in sets, && in a set, \b, \h, \R, {3,2} and others.
// - What ignores case in another way: under (?i) a literal "ss" or ß, [\p{Lu}], [[:upper:]] (Oniguruma folds to several
//   characters, and everything in a set).
//
//   pcre_of_oniguruma("a{2,3}+");   // (?:a{2,3})+
#pragma once

#include <string>

namespace phalanx::data {

std::string pcre_of_oniguruma(const std::string& pattern);

}  // namespace phalanx::data
