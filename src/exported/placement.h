// Where a program runs, as against where it was exported.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

#include "exported/format/program.h"

namespace tessera::exported {

/// Devices are constants in a graph. Those of the type that the weights had at
/// export stand for the device that the weights have now; others are meant
/// literally.
struct Placement {
  at::Device device{at::kCPU}; // of the weights, now
  std::string exported_type = "cpu"; // of the weights, at export
  /// The floating dtype that to() gave the model.
  std::optional<at::ScalarType> dtype;
  /// That of the process, which constants of a program may depend on.
  at::ScalarType default_dtype = at::kFloat;

  at::Device map(const Device& written) const {
    if (written.type == exported_type) {
      return device;
    }
    at::Device result(written.type);
    if (written.index) {
      result.set_index(static_cast<c10::DeviceIndex>(*written.index));
    }
    return result;
  }

  bool operator==(const Placement&) const = default;
};

} // namespace tessera::exported
