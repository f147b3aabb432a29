// Parts of a code that backward computes again.
#pragma once

#include <tessera/recompute/recompute.h>

#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "exported/code.h"
#include "exported/nested_steps.h"

namespace tessera::exported {

/// The modules that are recomputed, by path.
using RecomputedModules = std::map<std::string, RecomputeOptions>;

/// A module that cannot be recomputed; what() says why.
struct RefusedRegion : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// [Note: regions]
///
/// No module of an exported model has a forward of its own: its calls are runs
/// of consecutive nodes, which carry the module's path. Each such run becomes a
/// code of its own, whose inputs are the values that live in from before it,
/// and whose outputs are those that live on after it. One RecomputeStep takes
/// the place of its steps.
///
/// Buffers that a region writes to are written once: the second run gets copies
/// that have the values from before the first. The second run also gets copies
/// of buffers that the region reads and that other nodes write to.
///
/// A region must not write to values from before it, since the second run would
/// read what the first has written. Schemas tell most such regions, which are
/// refused when they are chosen. An operator may also return its argument
/// without saying so (dropout that drops nothing does), so the first run looks
/// whether its inputs were written.

/// Runs a graph under recompute().
struct RecomputeStep : NestedStep {
  void run(Frame& frame) const override;

  std::string path; // of the module
  RecomputeOptions options;
  /// Those of the region's weights that the program changes.
  std::vector<uint32_t> changing_weights;
};

/// Puts the calls of these modules under recompute(). `changing` are the
/// weights that the program changes in place, and that can be copied. Throws
/// RefusedRegion if the nodes of a call do not follow one another, or write to
/// other weights or to values from outside.
void recompute_regions(
    Code& code,
    const RecomputedModules& modules,
    const std::set<uint32_t>& changing);

} // namespace tessera::exported
