// Python's functions on numbers; python_math.h finds them by name.
#pragma once

#include <ATen/core/ivalue.h>

#include <span>

namespace tessera::exported::python {

using c10::IValue;
using Numbers = std::span<const IValue>;

// Arithmetic. Ints that leave 64 bits, and divisions by zero, throw c10::Error.
IValue add(Numbers args);
IValue mul(Numbers args);
IValue sub(Numbers args);
IValue neg(Numbers args);
IValue pos(Numbers args);
IValue floor_div(Numbers args);
IValue mod(Numbers args);
IValue true_div(Numbers args);
IValue power(Numbers args);
IValue modular_indexing(Numbers args);

// Comparisons and logic.
IValue less(Numbers args);
IValue less_equal(Numbers args);
IValue greater(Numbers args);
IValue greater_equal(Numbers args);
IValue equal(Numbers args);
IValue not_equal(Numbers args);
IValue logical_and(Numbers args);
IValue logical_or(Numbers args);
IValue logical_not(Numbers args);
IValue shift_left(Numbers args);
IValue shift_right(Numbers args);

// Choices and conversions.
IValue maximum(Numbers args);
IValue minimum(Numbers args);
IValue sym_maximum(Numbers args);
IValue sym_minimum(Numbers args);
IValue absolute(Numbers args);
IValue choose(Numbers args);
IValue floor_to_int(Numbers args);
IValue ceil_to_int(Numbers args);
IValue trunc_to_int(Numbers args);
IValue round_to_int(Numbers args);
IValue to_float(Numbers args);
IValue square_root(Numbers args);
IValue same(Numbers args);

// Properties of a tensor.
IValue sym_size(Numbers args);
IValue sym_sizes(Numbers args);
IValue sym_stride(Numbers args);
IValue sym_numel(Numbers args);
IValue sym_storage_offset(Numbers args);

} // namespace tessera::exported::python
