// Values as a line of text.
#pragma once

#include <tessera/state/state_dict.h>

#include <ATen/core/Tensor.h>

#include <string>

namespace tessera::state {

/// "Float [3, 4] on cpu: 0.25, 0.5, ..."
std::string describe(const at::Tensor& tensor);
/// "sharded Float [3, 4], here [0:2, 0:4]"
std::string describe(const ShardedTensor& tensor);
/// Lists and dicts by their size.
std::string describe(const StateValue& value);
/// A zero-dimensional tensor's value.
std::string number(const at::Tensor& scalar);

} // namespace tessera::state
