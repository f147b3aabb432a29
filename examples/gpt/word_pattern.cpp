#include "word_pattern.h"

#include <initializer_list>
#include <limits>
#include <span>

#include "unicode/characters.h"

namespace gpt {
namespace {

/// A set of classes, as bits.
constexpr unsigned bits(std::initializer_list<CharacterClass> classes) {
  unsigned set = 0;
  for (const auto kind : classes) {
    set |= 1U << static_cast<unsigned>(kind);
  }
  return set;
}

constexpr unsigned kLetters = bits(
    {CharacterClass::Upper, CharacterClass::Lower, CharacterClass::Uncased});
constexpr unsigned kMarks = bits({CharacterClass::Mark});
constexpr unsigned kNumbers = bits({CharacterClass::Number});
constexpr unsigned kOthers = bits({CharacterClass::Other});
constexpr unsigned kSpaces = bits({CharacterClass::Space});
bool is_in(const Character& character, unsigned classes) {
  return (classes >> static_cast<unsigned>(character.kind) & 1U) != 0;
}

bool is_newline(const Character& character) {
  return character.code == '\r' || character.code == '\n';
}

size_t end_of_run(
    std::string_view text,
    size_t begin,
    unsigned classes,
    size_t most = std::numeric_limits<size_t>::max()) {
  size_t end = begin;
  for (size_t i = 0; i < most && end < text.size(); ++i) {
    const auto character = character_at(text, end);
    if (!is_in(character, classes)) {
      break;
    }
    end += character.bytes;
  }
  return end;
}

/// `'s|'t|'re|'ve|'m|'ll|'d`; `begin` if there is none.
size_t end_of_contraction(
    std::string_view text,
    size_t begin,
    bool in_any_case) {
  if (begin >= text.size() || text[begin] != '\'') {
    return begin;
  }
  size_t end = begin + 1;
  const auto next = [&]() -> char32_t {
    if (end >= text.size()) {
      return 0;
    }
    const auto character = character_at(text, end);
    end += character.bytes;
    if (!in_any_case) {
      return character.code;
    }
    if (character.code == 0x17f) { // the long s, whose capital is S too
      return 's';
    }
    return character.code >= 'A' && character.code <= 'Z'
        ? character.code + ('a' - 'A')
        : character.code;
  };
  switch (next()) {
    case 's':
    case 't':
    case 'm':
    case 'd':
      return end;
    case 'r':
    case 'v':
      return next() == 'e' ? end : begin;
    case 'l':
      return next() == 'l' ? end : begin;
    default:
      return begin;
  }
}

// [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}] and [\p{Ll}\p{Lm}\p{Lo}\p{M}]. Letters
// without a case and marks are in both.
constexpr unsigned kNotLower = bits(
    {CharacterClass::Upper, CharacterClass::Uncased, CharacterClass::Mark});
constexpr unsigned kNotUpper = bits(
    {CharacterClass::Lower, CharacterClass::Uncased, CharacterClass::Mark});

/// `[not lower]*[not upper]+`; `begin` if there is none.
size_t end_of_lowered(std::string_view text, size_t begin) {
  size_t end = begin;
  size_t after_both = begin; // the last one that is in both
  while (end < text.size()) {
    const auto character = character_at(text, end);
    if (!is_in(character, kNotLower)) {
      break;
    }
    end += character.bytes;
    after_both = is_in(character, kNotUpper) ? end : after_both;
  }
  const size_t end_of_small = end_of_run(text, end, kNotUpper);
  return end_of_small > end ? end_of_small : after_both;
}

/// `[not lower]+[not upper]*`; `begin` if there is none.
size_t end_of_raised(std::string_view text, size_t begin) {
  const size_t end = end_of_run(text, begin, kNotLower);
  return end == begin ? begin : end_of_run(text, end, kNotUpper);
}

} // namespace

struct WordPattern::Known {
  const char* name;
  std::string_view regex;
  WordPattern pattern;

  static std::span<const Known> all();
};

std::span<const WordPattern::Known> WordPattern::Known::all() {
  static const auto make = [](Contractions before,
                              Letters letters,
                              Contractions after,
                              size_t most_numbers,
                              std::string_view others_end,
                              bool cuts_at_newlines) {
    WordPattern pattern;
    pattern.before_ = before;
    pattern.letters_ = letters;
    pattern.after_ = after;
    pattern.most_numbers_ = most_numbers;
    pattern.others_end_ = others_end;
    pattern.cuts_at_newlines_ = cuts_at_newlines;
    return pattern;
  };
  using C = Contractions;
  using L = Letters;
  static const Known known[] = {
      {"GPT-2",
       R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
       make(C::Exact, L::AfterSpace, C::None, 0, "", false)},
      {"Llama 3",
       R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       make(C::AnyCase, L::AfterOther, C::None, 3, "\r\n", true)},
      {"Qwen2",
       R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       make(C::AnyCase, L::AfterOther, C::None, 1, "\r\n", true)},
      {"Qwen3.5",
       R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       make(C::AnyCase, L::WithMarks, C::None, 1, "\r\n", true)},
      {"o200k",
       R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       make(C::None, L::ByCase, C::AnyCase, 3, "\r\n/", true)},
      {"Tekken",
       R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       make(C::None, L::ByCase, C::None, 1, "\r\n/", true)}};
  return known;
}

const WordPattern* WordPattern::find(std::string_view regex) {
  for (const Known& known : Known::all()) {
    if (known.regex == regex) {
      return &known.pattern;
    }
  }
  return nullptr;
}

const WordPattern& WordPattern::gpt2() {
  return Known::all().front().pattern;
}

std::string WordPattern::known_names() {
  std::string names;
  for (const Known& known : Known::all()) {
    names += (names.empty() ? "" : ", ") + std::string(known.name);
  }
  return names;
}

/// The first alternative of the pattern that matches. Each returns `begin` if
/// it does not.
size_t WordPattern::end_of_word(std::string_view text, size_t begin) const {
  size_t end = begin;
  if (before_ != Contractions::None) {
    end = end_of_contraction(text, begin, before_ == Contractions::AnyCase);
  }
  if (end == begin) {
    end = end_of_letters(text, begin);
  }
  if (end == begin) {
    end = end_of_numbers(text, begin);
  }
  if (end == begin) {
    end = end_of_others(text, begin);
  }
  return end == begin ? end_of_spaces(text, begin) : end;
}

size_t WordPattern::end_of_letters(std::string_view text, size_t begin) const {
  const auto first = character_at(text, begin);
  const bool may_precede = letters_ == Letters::AfterSpace
      ? first.code == ' '
      : !is_in(first, kLetters | kNumbers) && !is_newline(first);
  const size_t after_first = begin + first.bytes;
  if (letters_ != Letters::ByCase) {
    const unsigned classes =
        letters_ == Letters::WithMarks ? kLetters | kMarks : kLetters;
    if (may_precede) {
      const size_t end = end_of_run(text, after_first, classes);
      if (end > after_first) {
        return end;
      }
    }
    return end_of_run(text, begin, classes);
  }
  // Small letters at the end, with and without what precedes; then capitals.
  for (const auto find : {end_of_lowered, end_of_raised}) {
    for (const size_t from : {after_first, begin}) {
      if (from != begin && !may_precede) {
        continue;
      }
      if (const size_t end = find(text, from); end > from) {
        return after_ == Contractions::None
            ? end
            : end_of_contraction(text, end, /*in_any_case=*/true);
      }
    }
  }
  return begin;
}

size_t WordPattern::end_of_numbers(std::string_view text, size_t begin) const {
  if (most_numbers_ > 0) {
    return end_of_run(text, begin, kNumbers, most_numbers_);
  }
  const size_t first = text[begin] == ' ' ? begin + 1 : begin;
  const size_t end = end_of_run(text, first, kNumbers);
  return end > first ? end : begin;
}

size_t WordPattern::end_of_others(std::string_view text, size_t begin) const {
  const unsigned classes =
      letters_ == Letters::WithMarks ? kOthers : kOthers | kMarks;
  const size_t first = text[begin] == ' ' ? begin + 1 : begin;
  size_t end = end_of_run(text, first, classes);
  if (end == first) {
    return begin;
  }
  while (end < text.size() && others_end_.find(text[end]) != others_end_.npos) {
    ++end;
  }
  return end;
}

/// `\s*[\r\n]+|\s+(?!\S)|\s+`: to the last newline; else all but the last,
/// which belongs to the next word; else that one.
size_t WordPattern::end_of_spaces(std::string_view text, size_t begin) const {
  size_t end = begin;
  size_t last = begin;
  size_t after_newline = begin;
  while (end < text.size()) {
    const auto character = character_at(text, end);
    if (!is_in(character, kSpaces)) {
      break;
    }
    last = end;
    end += character.bytes;
    if (is_newline(character)) {
      after_newline = end;
    }
  }
  if (cuts_at_newlines_ && after_newline > begin) {
    return after_newline;
  }
  return end == text.size() || last == begin ? end : last;
}

} // namespace gpt
