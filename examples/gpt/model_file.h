#pragma once

#include <filesystem>
#include <string>

#include "settings.h"

namespace gpt {

/// 16 hexadecimal digits that tell one file from another: all of its bytes and
/// its length count. Not for protection from people who want them to be equal.
/// Throws UsageError if the file cannot be read.
std::string digest_of(const std::filesystem::path& path);

/// Sets the digest of --model, if there is one. Throws UsageError if the run
/// began with another file.
void check_model_file(Settings& settings);

} // namespace gpt
