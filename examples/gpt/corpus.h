#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "settings.h"
#include "tokenizer.h"

namespace gpt {

/// Text of a folder, made into tokens once: tokenizer.json, train.tokens,
/// validation.tokens, and source.json, which says what they were made from.
struct Corpus {
  std::filesystem::path train;
  std::filesystem::path validation;
  Tokenizer tokenizer;
};

/// Makes the files in `folder` unless they are there; of several processes that
/// ask for the same, one does. Throws std::runtime_error if there is no text,
/// or if what is there was made from something else. `is_trained_on`: a model
/// learned from these tokens, so text that changed since is mentioned and no
/// error. Returns what it did, in a sentence.
std::string prepare_corpus(
    const DataSettings& settings,
    const std::filesystem::path& folder,
    bool is_trained_on = false);

/// Opens what prepare_corpus() left.
Corpus open_corpus(const std::filesystem::path& folder);

} // namespace gpt
