// Makes flat programs of graphs.
#pragma once

#include <set>
#include <string>
#include <unordered_map>

#include "exported/code.h"
#include "exported/format/program.h"
#include "exported/placement.h"

namespace tessera::exported {

/// The number of a program's weight: a parameter, buffer or constant tensor, by
/// its name in the graph.
using WeightNumbers = std::unordered_map<std::string, uint32_t>;

/// What stands in the way of running a file, all of it.
struct Refusals {
  std::set<std::string> missing; // operators
  std::set<std::string> others; // sentences
};

/// Throws c10::NotImplementedError that lists them, if there are any; `path` is
/// the file's.
void refuse_all(const Refusals& refusals, const std::string& path);

/// The code of a program; its inputs are the user's, in the order of
/// `program.inputs`. `program` must outlive it. See [Note: flat programs].
/// It cannot be run if this adds to `refusals`.
Code compile(
    const Program& program,
    const WeightNumbers& weights,
    const Placement& placement,
    Refusals& refusals);

} // namespace tessera::exported
