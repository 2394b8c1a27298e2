// A regular expression of the `tokenizers` package, whose engine is Oniguruma with Ruby's syntax, as PCRE2 must be
// given it to find the same.
//
// Translated: \w and \s with their Unicode classes, scripts (\p{Han} is of characters, not of script extensions), \v,
// \u3042, (?m) (the dot matches a newline), (?i) in the middle of a group (which holds for all that follows, across |),
// POSIX brackets; and quantifiers: in a{2,3}+ and a{2}? the second sign is a quantifier of its own, a{,3} is a{0,3},
// what is no interval is text. Refused, by a DataError that names it: all that has another meaning in PCRE2 beside
// that, such as sets in sets, && in a set, \b, \h, \R and {3,2}, and what ignores case in another way: under (?i) a
// literal "ss" or ß, [\p{Lu}], [[:upper:]] (Oniguruma folds to several characters, and all that is in a set).
//
//   pcre_of_oniguruma("a{2,3}+");   // (?:a{2,3})+
#pragma once

#include <string>

namespace phalanx::data {

std::string pcre_of_oniguruma(const std::string& pattern);

}  // namespace phalanx::data
