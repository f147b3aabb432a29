#pragma once

#include <cstdint>
#include <string_view>

#include "exported/format/program.h"

namespace tessera::exported {

/// The schema of torch.export that is read. Files of other minor versions are
/// read too if they have no field that is not known.
constexpr int64_t kSchemaMajor = 8;
constexpr int64_t kSchemaMinor = 20;

/// Reads models/NAME.json. `entry` is its name, for messages. Throws
/// FormatError, and UnsupportedFormat for another major version, for fields and
/// codes that are not known, and for programs that use objects of custom
/// classes.
Program read_program(std::string_view json, std::string_view entry);

} // namespace tessera::exported
