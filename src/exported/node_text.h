// Nodes and dtypes in the words of errors.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

#include "exported/format/program.h"

namespace tessera::exported {

/// "node "linear_3" (torch.ops.aten.linear.default) of layers.0.mlp, line ...".
std::string describe_node(const Node& node);

/// The name of the first value that a node gives; empty if it gives none.
std::string first_name(const Node& node);

/// "a float32", "an int64".
std::string dtype_text(c10::ScalarType dtype);

} // namespace tessera::exported
