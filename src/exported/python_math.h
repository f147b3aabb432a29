// Functions of Python on numbers, by the names that graphs and expressions use.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <span>
#include <string_view>

namespace tessera::exported {

/// A function on numbers (or, for sym_size and its kin, on a tensor). It
/// follows Python: ints stay ints, // and % round down, / gives a float.
using PythonFunction = c10::IValue (*)(std::span<const c10::IValue>);

/// The function that a node's target names: "_operator.add", "math.ceil",
/// "torch.sym_max", "torch.ops.aten.sym_size.int". Null if there is none.
PythonFunction find_node_function(std::string_view target);

/// How many arguments the function of a node needs.
size_t num_operands(std::string_view target);

/// The function that an expression of a shape or a guard names: "Mul",
/// "FloorDiv", "Max". Null if there is none.
PythonFunction find_formula_function(std::string_view name);

/// Sums, differences and products of ints. Throw c10::Error if they leave 64
/// bits.
int64_t checked_add(int64_t a, int64_t b);
int64_t checked_sub(int64_t a, int64_t b);
int64_t checked_mul(int64_t a, int64_t b);

/// A number as a float. Throws c10::Error if it is none.
double as_float(const c10::IValue& number);
/// Whether Python takes the value as true: a number that is not 0, or a
/// tensor of one such element.
bool as_bool(const c10::IValue& value);
/// Compares two numbers, strings or Nones.
bool python_equal(const c10::IValue& a, const c10::IValue& b);

} // namespace tessera::exported
