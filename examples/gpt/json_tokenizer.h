#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "added_tokens.h"
#include "bpe_model.h"
#include "word_pattern.h"

namespace gpt {

/// What a tokenizer.json says, checked. The order is that of its work.
struct TokenizerParts {
  std::vector<AddedToken> added; // found in the text as it is
  bool to_nfc = false; // then the text between them is normalized
  std::vector<AddedToken> added_to_normal; // and these are found in it
  std::vector<const WordPattern*> splits; // and it is cut by each of these
  bool adds_space = false; // before what does not begin with one
  bool splits_like_gpt2 = false; // and is cut once more
  BpeParts model; // the tokens of a word
  /// What the post-processor puts around a text.
  std::vector<int32_t> before;
  std::vector<int32_t> after;
  /// The bytes of each token; of some numbers there may be no token.
  std::vector<std::string> bytes_of;
};

/// Whether the tokens that the file's post-processor adds are added, such as
/// one for the beginning of a text.
enum class TextEnds { Bare, Marked };

/// A byte-level BPE tokenizer in the format of Hugging Face's `tokenizers`
/// package: the tokens are those that the package gives for the same text.
/// Bytes that are not UTF-8, which the package does not take, become tokens of
/// their own. One thread at a time may use it.
class JsonTokenizer {
 public:
  /// The text of the file. Throws std::runtime_error, also for a file that is
  /// larger than any tokenizer.json.
  static std::string text_of(const std::filesystem::path& path);
  /// Reads a tokenizer.json. Throws std::runtime_error, with the path, the
  /// field and its value, for everything it would not do as the package does.
  static JsonTokenizer read(const std::filesystem::path& path);
  /// From the text of one; `name` is for messages.
  static JsonTokenizer parse(std::string_view json, const std::string& name);

  /// One more than the highest number of a token.
  int64_t vocabulary() const;
  /// Throws std::runtime_error for text with a byte that has no token, which a
  /// vocabulary without some bytes and without an unk_token leads to.
  std::vector<int32_t> encode(
      std::string_view text,
      TextEnds ends = TextEnds::Bare);
  /// The bytes of the tokens. Added tokens become their text. Throws
  /// std::out_of_range for a token that does not exist.
  std::string decode(std::span<const int32_t> tokens) const;

 private:
  JsonTokenizer(TokenizerParts parts, std::string name);

  void encode_normal(std::string_view text, std::vector<int32_t>& tokens);
  void encode_words(
      std::string_view text,
      size_t step,
      std::vector<int32_t>& tokens);

  TokenizerParts parts_;
  std::string name_;
  AddedTokens added_;
  AddedTokens added_to_normal_;
  BpeModel model_;
};

} // namespace gpt
