// The kinds of steps that are no graphs of their own.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "exported/code.h"
#include "exported/python_math.h"

namespace tessera::exported {

/// Calls an operator of LibTorch, or of a library that registers its own.
struct OperatorStep : Step {
  explicit OperatorStep(c10::OperatorHandle handle) : op(std::move(handle)) {}
  void run(Frame& frame) const override;

  c10::OperatorHandle op;
};

/// Computes with numbers.
struct FunctionStep : Step {
  explicit FunctionStep(PythonFunction call) : function(call) {}
  void run(Frame& frame) const override;

  PythonFunction function;
};

} // namespace tessera::exported
