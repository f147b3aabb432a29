#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gpt {

/// Converts text to tokens and back. Tokens 0 to 255 are the bytes; each
/// further token is a pair of earlier ones that is frequent in the text it
/// learned from (byte pair encoding). Pairs never extend over the end of a
/// word.
class Tokenizer {
 public:
  /// Only bytes as tokens.
  Tokenizer() = default;

  /// Learns pairs until there are `vocabulary` tokens, or no pair that occurs
  /// twice. The same text gives the same tokens.
  static Tokenizer learn(std::string_view text, int64_t vocabulary);

  int64_t vocabulary() const;
  std::vector<int32_t> encode(std::string_view text);
  /// Throws std::out_of_range for a token that does not exist.
  std::string decode(std::span<const int32_t> tokens) const;

  /// Save and load as JSON. Both throw std::runtime_error; load() also for a
  /// file that is not what save() writes.
  void save(const std::filesystem::path& path) const;
  static Tokenizer load(const std::filesystem::path& path);

 private:
  using Pair = std::pair<int32_t, int32_t>;

  void add(Pair pair);
  std::vector<int32_t> encode_word(std::string_view word) const;

  std::vector<std::string> pieces_; // text of token 256 and up
  std::vector<Pair> merges_; // what they are made of
  std::map<Pair, int32_t> token_of_;
  std::unordered_map<std::string, std::vector<int32_t>> known_words_;
};

/// Cuts text into words, over whose ends no token extends: a word is a blank,
/// if there is one, and the following characters of one kind (letters and
/// digits, blanks, or others).
std::vector<std::string_view> words_of(std::string_view text);

} // namespace gpt
