#pragma once

#include "exported/format/json_at.h"
#include "exported/format/module_frames.h"
#include "exported/format/program.h"

namespace tessera::exported {

/// What an input of the graph stands for. Throws UnsupportedFormat for objects
/// of custom classes.
InputSpec read_input_spec(const JsonAt& at, const OddPaths& odd_paths);

OutputSpec read_output_spec(const JsonAt& at, const OddPaths& odd_paths);

} // namespace tessera::exported
