// The blocks that a program repeats.
#pragma once

#include <set>
#include <string>

#include "exported/format/program.h"

namespace tessera::plan {

/// Paths of the modules that block_policy() takes for units and that
/// `--recompute` recomputes: elements of numbered lists of one class.
std::set<std::string> repeated_blocks(const exported::Program& program);

} // namespace tessera::plan
