// Token files that were made elsewhere, as a corpus.
#pragma once

#include <nlohmann/json.hpp>

#include "corpus.h"
#include "settings.h"

namespace gpt {

/// What source.json says about --tokens and --validation-tokens. Throws
/// std::runtime_error if one of them cannot be read, and UsageError if they do
/// not fit the tokenizer.
nlohmann::json source_of_given(const DataSettings& settings);

/// The sizes of the files, for people.
std::string described_given(const nlohmann::json& source);

/// Opens the files that `source` names. `tokenizer` is the folder's
/// tokenizer.json, if there is one.
Corpus open_given(
    const nlohmann::json& source,
    const std::filesystem::path& tokenizer);

} // namespace gpt
