// Converts values and dtypes between state dicts and file formats.
#pragma once

#include <tessera/state/state_dict.h>

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

#include "checkpoint/format/dtype.h"
#include "checkpoint/format/pickle_value.h"

namespace tessera::checkpoint {

/// Returns nothing for dtypes that files cannot hold (quantized ones).
std::optional<format::DType> to_format(at::ScalarType dtype);
at::ScalarType from_format(format::DType dtype);

/// Converts a value without tensors. Keys that are numbers stay numbers.
format::Value to_format(const StateValue& value);
/// Tuples and sizes become lists. Throws c10::ValueError with `name` for what a
/// state dict cannot hold: bytes, sets, complex numbers, torch's own types.
StateValue from_format(const format::Value& value, const std::string& name);

} // namespace tessera::checkpoint
