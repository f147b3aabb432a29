#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gpt {

/// Finds std::string by std::string_view.
struct TextHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const {
    return std::hash<std::string_view>()(text);
  }
};
template <class Value>
using TextMap =
    std::unordered_map<std::string, Value, TextHash, std::equal_to<>>;

/// The model of a tokenizer.json, with tokens as they are spelled there.
struct BpeParts {
  TextMap<int32_t> id_of;
  std::vector<std::pair<std::string, std::string>> merges; // first ones first
  std::optional<std::string> unknown; // unk_token
  bool fuses_unknown = false;
  bool ignores_merges = false;
};

/// Byte pair encoding of words: a word begins as its bytes, then the pair of
/// neighbours whose merge comes first in the list becomes one token, the
/// leftmost one first, until there is none. One thread at a time may use it.
class BpeModel {
 public:
  /// Throws std::runtime_error if a merge names or makes a token that is not in
  /// the vocabulary.
  explicit BpeModel(const BpeParts& parts);

  /// Appends the tokens of one word, in O(n log n). Throws std::runtime_error
  /// for a byte that has no token if there is no unk_token.
  void encode(std::string_view word, std::vector<int32_t>& tokens);

 private:
  struct Merge {
    int32_t rank = 0;
    int32_t token = 0;
  };
  using Merges = std::unordered_map<uint64_t, Merge>;

  std::vector<int32_t> tokens_of_bytes(std::string_view word) const;
  std::vector<int32_t> merged(const std::vector<int32_t>& tokens) const;
  const Merge* merge_of(int32_t left, int32_t right) const;

  std::array<int32_t, 256> token_of_byte_{}; // -1: none
  Merges merges_;
  TextMap<int32_t> whole_words_; // with ignore_merges: tokens by their bytes
  int32_t unknown_ = -1;
  bool fuses_unknown_ = false;
  TextMap<std::vector<int32_t>> known_words_; // a cache
};

} // namespace gpt
