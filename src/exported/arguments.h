// Arguments of nodes, as operands of steps.
#pragma once

#include <ATen/core/function_schema.h>

#include <span>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "exported/code.h"
#include "exported/format/program.h"
#include "exported/placement.h"

namespace tessera::exported {

/// A part of a program that cannot be run; what() names it.
struct RefusedNode : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Turns the arguments of one graph's nodes into operands. Constants go into
/// the graph's Code. All calls throw RefusedNode.
class Arguments {
 public:
  Arguments(Code& code, const Placement& placement)
      : code_(code), placement_(placement) {}

  /// Tells where a name's value is from now on.
  void define(const std::string& name, Source source);

  /// An argument of an operator, in the form that the operator takes.
  Operand operand(const Argument& argument, const c10::Argument& formal);
  /// An argument of a function that is no operator: as it is.
  Operand operand(const Argument& argument);
  /// Where a single value comes from.
  Source source(const Argument& argument);
  /// A constant as a source.
  Source constant(c10::IValue value);

 private:
  Source named(const std::string& name) const;
  std::vector<Source> elements(const Argument& argument);
  Operand list(const Argument& argument, const c10::Argument& formal);
  Operand list_of(Operand::Form form, std::vector<Source> elements);

  Code& code_;
  const Placement& placement_;
  std::unordered_map<std::string, Source> names_;
};

bool is_list(const Argument& argument);

} // namespace tessera::exported
