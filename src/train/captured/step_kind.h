// What a recorded step takes for granted.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "train/captured/step_parts.h"

namespace tessera::train {

/// Two steps are of one kind if they differ in values alone: in those of
/// inputs, parameters, state and learning rates. The same bytes mean the same
/// kind: shapes, dtypes and strides of the inputs, what is trained and has a
/// gradient, what units do with gradients, modes of the modules, autocast,
/// switches of LibTorch, and the options of the groups.
struct StepKind {
  std::string bytes;

  /// What the bytes from the part before it to `end` are.
  struct Part {
    const char* what;
    bool is_option; // then `what` is its name
    size_t end;
  };
  std::vector<Part> parts;

  /// The first part in which this kind differs from `other`; null if none does.
  const Part* first_difference(const StepKind& other) const;
};

StepKind kind_of_step(
    const StepParts& parts,
    const std::vector<at::Tensor>& inputs);

/// The part with these names, in the text of StepKind::Part::what.
inline constexpr const char* kShapesOfInputs = "the shape of an input";

} // namespace tessera::train
