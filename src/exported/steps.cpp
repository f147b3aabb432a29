#include "exported/steps.h"

#include <utility>

namespace tessera::exported {

void OperatorStep::run(Frame& frame) const {
  std::vector<c10::IValue>& stack = frame.stack();
  stack.clear();
  for (const Operand& operand : operands) {
    stack.push_back(frame.take(operand));
  }
  op.callBoxed(stack);
  for (size_t i = 0; i < results.size(); ++i) {
    frame.set(results[i], std::move(stack[i]));
  }
  stack.clear();
}

void FunctionStep::run(Frame& frame) const {
  std::vector<c10::IValue>& stack = frame.stack();
  stack.clear();
  for (const Operand& operand : operands) {
    stack.push_back(frame.take(operand));
  }
  frame.set(results.front(), function(stack));
  stack.clear();
}

} // namespace tessera::exported
