#pragma once

#include <map>
#include <string>
#include <vector>

#include "exported/format/json_at.h"
#include "exported/format/program.h"

namespace tessera::exported {

/// The fields of named tuples, by the name of their type.
using NamedTupleFields = std::map<std::string, std::vector<std::string>>;

/// A string that holds a TreeSpec as JSON: [1, {"type": ..., "context": ...,
/// "children_spec": [...]}].
TreeSpec read_tree_spec(const JsonAt& at, const NamedTupleFields& named_tuples);

} // namespace tessera::exported
