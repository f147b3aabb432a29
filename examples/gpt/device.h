#pragma once

#include <torch/torch.h>

#include <string>

namespace gpt {

/// The device of this rank for --device `name`. Throws UsageError if there is
/// none.
torch::Device device_of(const std::string& name);

} // namespace gpt
