// Python values, taken apart into leaves and put together.
#pragma once

#include <tessera/exported/value.h>

#include <ATen/core/ivalue.h>

#include <functional>
#include <string>
#include <vector>

#include "exported/format/program.h"

namespace tessera::exported {

/// Names of the leaves below a value named `name`: `x`, `x['k'][0]`.
void leaf_names(
    const TreeSpec& spec,
    const std::string& name,
    std::vector<std::string>& names);

/// The leaves of a value that must have the form of `spec`. Tuples and lists
/// stand for one another, and so do a dictionary and a class with the same
/// fields. Throws c10::ValueError that names the input.
void flatten_value(
    const TreeSpec& spec,
    const std::string& name,
    const ExportedValue& value,
    std::vector<const ExportedValue*>& leaves);

/// The value of the form `spec` that has these leaves, from `next` on.
ExportedValue unflatten_value(
    const TreeSpec& spec,
    const std::vector<c10::IValue>& leaves,
    size_t& next);

/// A single value for a run, and back.
c10::IValue to_ivalue(const ExportedValue& value);
ExportedValue to_value(const c10::IValue& value);

} // namespace tessera::exported
