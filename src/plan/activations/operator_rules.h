// What operators allocate, what autograd saves of them, and what their backward
// allocates, by the operator's name.
#pragma once

#include <optional>
#include <string_view>

#include "plan/activations/operator_call.h"

namespace tessera::plan {

/// Gives the results of a call, if there is a rule for the operator. False if
/// there is none; nothing happened then.
bool apply_rule(std::string_view name, OperatorCall& call);

// The rules by family. Each returns false for names of others.
bool apply_element_rule(std::string_view name, OperatorCall& call);
bool apply_view_rule(std::string_view name, OperatorCall& call);
bool apply_product_rule(std::string_view name, OperatorCall& call);
bool apply_layer_rule(std::string_view name, OperatorCall& call);
bool apply_attention_rule(std::string_view name, OperatorCall& call);

/// What several rules do on the way. Each returns a tensor of the call.
ValueId cast(OperatorCall& call, ValueId value, format::DType dtype);
ValueId contiguous_copy(OperatorCall& call, ValueId value);
/// The product of two factors, which may be matrices or batches of matrices,
/// with what is added to it in place.
ValueId product(
    OperatorCall& call,
    ValueId left,
    ValueId right,
    const TensorShape& shape,
    std::optional<ValueId> added = std::nullopt);

} // namespace tessera::plan
