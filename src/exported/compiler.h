// Makes flat programs of graphs.
#pragma once

#include <map>
#include <string>
#include <unordered_map>

#include "exported/code.h"
#include "exported/format/program.h"
#include "exported/placement.h"

namespace tessera::exported {

/// The number of a program's weight: a parameter, buffer or constant tensor, by
/// its name in the graph.
using WeightNumbers = std::unordered_map<std::string, uint32_t>;

/// The code of a program; its inputs are the user's, in the order of
/// `program.inputs`. `program` must outlive it. See [Note: flat programs].
///
/// Throws c10::NotImplementedError, with all operators that this LibTorch lacks
/// and all nodes that cannot be run; `path` is the file's.
Code compile(
    const Program& program,
    const WeightNumbers& weights,
    const Placement& placement,
    const std::string& path);

} // namespace tessera::exported
