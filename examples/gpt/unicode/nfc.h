#pragma once

#include <string>
#include <string_view>

namespace gpt {

/// Normalization Form C of UTF-8 text: characters that can be written in
/// several ways are written in one. By Unicode 9.0, as Hugging Face's package
/// does: characters that came later stay as they are, and so do bytes that are
/// no part of UTF-8.
std::string to_nfc(std::string_view text);

} // namespace gpt
