#include "nfc.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <unordered_map>
#include <vector>

#include "characters.h"

namespace gpt {
namespace {

#include "combining.inc"
#include "decompositions.inc"

constexpr uint64_t kCharacter = 0x1fffff; // 21 bits

// Hangul syllables are computed: chapter 3.12 of the Unicode Standard.
constexpr char32_t kSyllables = 0xac00;
constexpr char32_t kLeads = 0x1100;
constexpr char32_t kVowels = 0x1161;
constexpr char32_t kTails = 0x11a7; // one before the first
constexpr char32_t kNumLeads = 19;
constexpr char32_t kNumVowels = 21;
constexpr char32_t kNumTails = 28;
constexpr char32_t kNumSyllables = kNumLeads * kNumVowels * kNumTails;

struct Letter {
  char32_t code = 0;
  uint8_t combining = 0; // canonical combining class
};

uint8_t combining_class(char32_t code) {
  const auto* after = std::upper_bound(
      std::begin(kCombiningRanges),
      std::end(kCombiningRanges),
      uint64_t{code} << 32 | 0xffffffffU);
  if (after == std::begin(kCombiningRanges)) {
    return 0;
  }
  const uint64_t range = *std::prev(after);
  const uint64_t last = (range >> 32) + (range >> 8 & 0xffffffU);
  return code <= last ? static_cast<uint8_t>(range & 0xffU) : 0;
}

/// The entry of a table whose numbers begin with `code`, after `shift` bits.
template <size_t Size>
std::optional<uint64_t> entry_of(
    const uint64_t (&table)[Size],
    char32_t code,
    int shift) {
  const auto code_of = [shift](uint64_t entry) {
    return entry >> shift & kCharacter;
  };
  const auto* found = std::lower_bound(
      std::begin(table),
      std::end(table),
      uint64_t{code},
      [&](uint64_t entry, uint64_t wanted) { return code_of(entry) < wanted; });
  if (found == std::end(table) || code_of(*found) != code) {
    return std::nullopt;
  }
  return *found;
}

void decompose(char32_t code, std::vector<Letter>& letters) {
  if (code >= kSyllables && code < kSyllables + kNumSyllables) {
    const char32_t index = code - kSyllables;
    letters.push_back({kLeads + index / (kNumVowels * kNumTails), 0});
    letters.push_back({kVowels + index / kNumTails % kNumVowels, 0});
    if (index % kNumTails != 0) {
      letters.push_back({kTails + index % kNumTails, 0});
    }
    return;
  }
  if (const auto pair = entry_of(kPairs, code, 42)) {
    decompose(static_cast<char32_t>(*pair >> 21 & kCharacter), letters);
    decompose(static_cast<char32_t>(*pair & kCharacter), letters);
  } else if (const auto single = entry_of(kSingles, code, 21)) {
    decompose(static_cast<char32_t>(*single & kCharacter), letters);
  } else {
    letters.push_back({code, combining_class(code)});
  }
}

std::unordered_map<uint64_t, char32_t> compositions() {
  std::unordered_map<uint64_t, char32_t> composed;
  for (const uint64_t pair : kPairs) {
    if (pair >> 63 != 0) {
      composed[pair & (kCharacter << 21 | kCharacter)] =
          static_cast<char32_t>(pair >> 42 & kCharacter);
    }
  }
  return composed;
}

/// 0 if the two do not compose.
char32_t composed(char32_t first, char32_t second) {
  if (first >= kLeads && first < kLeads + kNumLeads && second >= kVowels &&
      second < kVowels + kNumVowels) {
    return kSyllables +
        ((first - kLeads) * kNumVowels + (second - kVowels)) * kNumTails;
  }
  if (first >= kSyllables && first < kSyllables + kNumSyllables &&
      (first - kSyllables) % kNumTails == 0 && second > kTails &&
      second < kTails + kNumTails) {
    return first + (second - kTails);
  }
  static const auto table = compositions();
  const auto found = table.find(uint64_t{first} << 21 | second);
  return found == table.end() ? 0 : found->second;
}

/// Marks after a letter stand in the order of their combining classes.
void order(std::vector<Letter>& letters) {
  auto begin = letters.begin();
  while (begin != letters.end()) {
    if (begin->combining == 0) {
      ++begin;
      continue;
    }
    const auto end = std::find_if(
        begin, letters.end(), [](const Letter& l) { return l.combining == 0; });
    std::stable_sort(begin, end, [](const Letter& a, const Letter& b) {
      return a.combining < b.combining;
    });
    begin = end;
  }
}

/// Joins each letter with the marks after it that nothing keeps apart from it.
void compose(std::vector<Letter>& letters) {
  size_t kept = 0;
  std::optional<size_t> starter; // the newest letter of class 0
  for (size_t i = 0; i < letters.size(); ++i) {
    const Letter letter = letters[i];
    if (starter) {
      const bool is_next = *starter + 1 == kept;
      // A kept mark of the same or a higher class, or a letter, is in between.
      const bool is_blocked =
          !is_next && letters[kept - 1].combining >= letter.combining;
      const char32_t both =
          is_blocked ? 0 : composed(letters[*starter].code, letter.code);
      if (both != 0) {
        letters[*starter].code = both;
        continue;
      }
    }
    if (letter.combining == 0) {
      starter = kept;
    }
    letters[kept++] = letter;
  }
  letters.resize(kept);
}

} // namespace

std::string to_nfc(std::string_view text) {
  // Bytes below 0xCC begin characters before U+0300, the first mark.
  const bool is_normal = std::all_of(text.begin(), text.end(), [](char byte) {
    return static_cast<unsigned char>(byte) < 0xcc;
  });
  if (is_normal) {
    return std::string(text);
  }
  std::vector<Letter> letters;
  for (size_t at = 0; at < text.size();) {
    const auto character = character_at(text, at);
    if (character.code < 0x80 || character.code >= kNoCharacter) {
      letters.push_back({character.code, 0});
    } else {
      decompose(character.code, letters);
    }
    at += character.bytes;
  }
  order(letters);
  compose(letters);
  std::string normal;
  normal.reserve(text.size());
  for (const Letter& letter : letters) {
    append_character(normal, letter.code);
  }
  return normal;
}

} // namespace gpt
