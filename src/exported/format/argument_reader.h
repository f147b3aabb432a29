#pragma once

#include <string>

#include "exported/format/json_at.h"
#include "exported/format/module_frames.h"
#include "exported/format/program.h"

namespace tessera::exported {

/// One of the `as_...` of the schema. Throws UnsupportedFormat for objects of
/// custom classes, with the name of the class.
Argument read_argument(const JsonAt& at, const OddPaths& odd_paths);

/// {"name": "x"}
TensorName read_tensor_name(const JsonAt& at);

[[noreturn]] void refuse_object(
    const JsonAt& at,
    const std::string& name,
    const std::string& class_name);

} // namespace tessera::exported
