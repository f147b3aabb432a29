// Values and dtypes between state dicts and the formats of files.
#pragma once

#include <tessera/state/state_dict.h>

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

#include "checkpoint/format/dtype.h"
#include "checkpoint/format/value.h"

namespace tessera::checkpoint {

/// Nothing for dtypes that files cannot have (quantized ones).
std::optional<format::DType> to_format(at::ScalarType dtype);
at::ScalarType from_format(format::DType dtype);

/// A value without tensors. Numbers that were keys stay numbers.
format::Value to_format(const StateValue& value);
/// Tuples and sizes become lists. Throws c10::ValueError with `name` for what a
/// state dict cannot hold: bytes, sets, complex numbers, torch's own types.
StateValue from_format(const format::Value& value, const std::string& name);

} // namespace tessera::checkpoint
