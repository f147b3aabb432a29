#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace gpt {

/// The regular expression by which a tokenizer cuts text into words. Known are
/// the expressions of some tokenizers, each as a whole: they are not
/// interpreted but matched by code that finds the same words. Every text is cut
/// without a rest.
class WordPattern {
 public:
  /// The pattern that is spelled exactly like this; nullptr for others.
  static const WordPattern* find(std::string_view regex);
  /// What ByteLevel uses by itself.
  static const WordPattern& gpt2();
  /// The names of those that find() knows, for messages.
  static std::string known_names();

  /// The end of the word that begins at byte `begin`, begin < text.size().
  /// Above `begin`.
  size_t end_of_word(std::string_view text, size_t begin) const;

 private:
  enum class Contractions { None, Exact, AnyCase };
  enum class Letters {
    AfterSpace, // ` ?\p{L}+`
    AfterOther, // `[^\r\n\p{L}\p{N}]?\p{L}+`
    WithMarks, // `[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+`
    ByCase // a capital begins a word
  };
  struct Known;

  size_t end_of_letters(std::string_view text, size_t begin) const;
  size_t end_of_numbers(std::string_view text, size_t begin) const;
  size_t end_of_others(std::string_view text, size_t begin) const;
  size_t end_of_spaces(std::string_view text, size_t begin) const;

  Contractions before_ = Contractions::None; // as words of their own
  Letters letters_ = Letters::AfterSpace;
  Contractions after_ = Contractions::None; // as ends of words
  size_t most_numbers_ = 0; // 0: any, after a space
  std::string_view others_end_; // what may follow others, any number of times
  bool cuts_at_newlines_ = true; // `\s*[\r\n]+`
};

} // namespace gpt
