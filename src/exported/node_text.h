// Nodes in the words of errors.
#pragma once

#include <string>

#include "exported/format/program.h"

namespace tessera::exported {

/// "node "linear_3" (torch.ops.aten.linear.default) of layers.0.mlp, line ...".
std::string describe_node(const Node& node);

/// The name of the first value that a node gives; empty if it gives none.
std::string first_name(const Node& node);

} // namespace tessera::exported
