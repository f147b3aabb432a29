#pragma once

#include "exported/format/json_at.h"
#include "exported/format/module_frames.h"
#include "exported/format/program.h"

namespace tessera::exported {

/// A graph with its nodes, and with the graphs that are arguments of nodes.
Graph read_graph(const JsonAt& at, const OddPaths& odd_paths);

} // namespace tessera::exported
