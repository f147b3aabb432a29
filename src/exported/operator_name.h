// Operators, found by the names that exported programs have for them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>

#include "checkpoint/scalar_type.h"
#include "exported/format/program.h"

namespace tessera::exported {

/// Whether a program may call the operator. The operators of LibTorch and of
/// Tessera that open files, send to other ranks or look at memory by address
/// are no part of a model; those of other libraries are their authors' affair.
bool may_be_called(const std::string& target);

/// "torch.ops.aten.add.Tensor" is the operator aten::add of overload Tensor.
std::optional<c10::OperatorHandle> find_operator(const std::string& target);

/// The name as LibTorch writes it: "aten::add.Tensor".
std::string operator_text(const std::string& target);

inline at::ScalarType to_scalar_type(DType dtype) {
  return checkpoint::scalar_type(dtype);
}

} // namespace tessera::exported
