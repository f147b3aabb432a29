// A device that records steps, for tests on the CPU: a tape of operators in
// place of a CUDA graph, with the rules of one.
#pragma once

#include <memory>

#include "train/captured/step_graph.h"

namespace tessera::testing {

/// While it lives, the CPU records steps.
///
/// The tape is below autograd: it notes each operator with the addresses of its
/// tensors and calls the operator again, in a replay, on what lies there then.
/// As with a CUDA graph
/// - what was recorded has had no effect: memory and generator are as before;
/// - memory that the step took belongs to the tape and keeps its place;
/// - a replay runs nothing of the program, so host objects stay as they are;
/// - an operator that gives a value to the host throws;
/// - collectives of several ranks are made by replays alone.
/// Unlike one, the tape does not see what other code does to memory without an
/// operator.
class Tapes {
 public:
  Tapes();
  ~Tapes();
  Tapes(const Tapes&) = delete;
  Tapes& operator=(const Tapes&) = delete;
};

} // namespace tessera::testing
