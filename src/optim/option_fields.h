// Converts options of param groups to and from dictionaries, by tables of
// fields.
#pragma once

#include <tessera/error.h>
#include <tessera/optim/options.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera::optim {

void write_fields(const std::vector<OptionField>& fields, StateDict& group);

/// Reads the fields that `group` has. Throws c10::TypeError for values of
/// another kind, c10::ValueError if a fixed field has another value.
/// `group_name` is for errors: "param group 1".
void read_fields(
    const std::vector<OptionField>& fields,
    const StateDict& group,
    const ErrorSite& site,
    const std::string& group_name);

/// A description of the first value out of its range; nullopt if there is none.
std::optional<std::string> range_objection(
    const std::vector<OptionField>& fields);

/// Python's options that select one of its implementations. Tessera has one
/// implementation, which fits both values.
OptionField::Fixed not_differentiable();
OptionField::Fixed not_capturable();

} // namespace tessera::optim
