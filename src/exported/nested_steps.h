// Steps that run graphs of their own: higher-order operators.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>
#include <string_view>

#include "exported/code.h"
#include "exported/format/program.h"
#include "exported/placement.h"

namespace tessera::exported {

/// Runs one or two graphs. The operands are the graphs' inputs, after those
/// that the operator takes itself.
struct NestedStep : Step {
  std::vector<Code*> nested() override;

  Code first;
  Code second; // empty if there is one only
};

/// Switches gradients on or off around a graph.
struct GradModeStep : NestedStep {
  void run(Frame& frame) const override;

  bool enabled = true;
};

/// Switches autocast on or off around a graph.
struct AutocastStep : NestedStep {
  void run(Frame& frame) const override;

  at::DeviceType type = at::kCPU;
  std::optional<at::ScalarType> dtype;
  bool enabled = true;
  bool caches = true;
};

/// Runs the first graph as it is: operators that only mark it.
struct PlainGraphStep : NestedStep {
  void run(Frame& frame) const override;
};

/// cond: the first operand chooses the first graph, if true, or the second.
struct CondStep : NestedStep {
  void run(Frame& frame) const override;
};

/// while_loop: as long as the first graph gives true, the second gives the next
/// carried values.
struct WhileStep : NestedStep {
  void run(Frame& frame) const override;

  size_t num_carried = 0;
};

/// scan, and map as a scan that carries nothing: runs the graph for each row of
/// some operands. Gives the carried values, then rows put together.
struct ScanStep : NestedStep {
  void run(Frame& frame) const override;

  size_t num_carried = 0; // the first operands
  size_t num_rows = 0; // those that are taken by rows, after these
};

} // namespace tessera::exported
