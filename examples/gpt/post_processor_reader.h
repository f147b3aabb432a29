#pragma once

#include "json_section.h"
#include "json_tokenizer.h"

namespace gpt {

/// Reads the post_processor of a tokenizer.json: which tokens stand before and
/// after a text. Returns whether it is, or has, a template, of which there may
/// be one. Throws std::runtime_error for what is not supported.
bool read_post_processor(JsonSection section, TokenizerParts& parts);

} // namespace gpt
