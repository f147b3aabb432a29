#pragma once

#include <string_view>

#include "json_tokenizer.h"

namespace gpt {

/// Reads the text of a tokenizer.json. Throws std::runtime_error, with the
/// field and its value, for what is damaged or not supported.
TokenizerParts read_tokenizer_parts(std::string_view json);

} // namespace gpt
