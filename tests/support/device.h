// Where tests put their models.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdlib>

namespace tessera::testing {

/// The CPU, or what TESSERA_TEST_DEVICE says: hosts with a GPU run tests twice.
inline at::Device test_device() {
  const char* name = std::getenv("TESSERA_TEST_DEVICE");
  return at::Device(name == nullptr ? "cpu" : name);
}

} // namespace tessera::testing
