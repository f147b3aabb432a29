#pragma once

#include <tessera/data/token_file.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "any_tokenizer.h"
#include "settings.h"

namespace gpt {

/// The text of a folder, turned into tokens once: tokenizer.json, train.tokens,
/// validation.tokens, and source.json, which says what they were made from. A
/// tokenizer.json that was given is kept as it is, byte for byte. Token files
/// that were given stay where they are: source.json says where.
struct Corpus {
  tessera::data::TokenFile train;
  std::optional<tessera::data::TokenFile> validation; // of text always
  AnyTokenizer tokenizer;

  /// All tokens are smaller.
  int64_t vocabulary() const {
    return validation ? std::max(train.vocabulary(), validation->vocabulary())
                      : train.vocabulary();
  }
};

/// Creates the files in `folder` unless they exist; if several processes ask
/// for the same folder, one of them does. Throws std::runtime_error if there is
/// no text, or if existing files were made from something else, with another
/// tokenizer.json too. `is_trained_on` means that a model learned from these
/// tokens, so text or a tokenizer.json that has changed since is mentioned and
/// not an error. Returns a sentence about what was done.
std::string prepare_corpus(
    const DataSettings& settings,
    const std::filesystem::path& folder,
    bool is_trained_on = false);

/// Opens the files that prepare_corpus() created. Throws std::runtime_error if
/// one is damaged.
Corpus open_corpus(const std::filesystem::path& folder);

} // namespace gpt
