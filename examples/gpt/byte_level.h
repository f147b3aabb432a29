#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace gpt {

/// A tokenizer.json spells each of the 256 bytes as a visible character: those
/// that are printable in Latin-1 as themselves, the others, in their order, as
/// U+0100 and up.
std::string spelled_byte(unsigned char byte);

/// The bytes that `spelled` stands for; nothing if it has a character that
/// stands for no byte.
std::optional<std::string> bytes_of_spelled(std::string_view spelled);

} // namespace gpt
