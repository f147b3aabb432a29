#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gpt {

/// A text that is one token wherever it occurs, such as "<|endoftext|>".
struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool takes_spaces_before = false; // lstrip
  bool takes_spaces_after = false; // rstrip
};

/// Finds added tokens in text: from left to right, of those that begin at one
/// place the longest.
class AddedTokens {
 public:
  AddedTokens() = default;
  /// Throws std::runtime_error if two have the same text, or one has none.
  explicit AddedTokens(std::vector<AddedToken> tokens);

  /// A stretch of text: an added token, or what is between two of them.
  struct Part {
    std::string_view text;
    int32_t id = -1; // of the token; -1 for what is between
  };
  /// The parts, none of them empty, in their order.
  std::vector<Part> split(std::string_view text) const;

 private:
  const AddedToken* longest_at(std::string_view text, size_t at) const;

  std::vector<AddedToken> tokens_; // in the order of their bytes
  std::array<bool, 256> begins_{}; // whether one begins with the byte
};

} // namespace gpt
