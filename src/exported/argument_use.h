// What an operator does with its arguments.
#pragma once

#include <ATen/core/function_schema.h>

#include <cstddef>
#include <optional>

#include "exported/code.h"
#include "exported/format/program.h"

namespace tessera::exported {

/// What a node does with its arguments, beyond what the schema says: batch norm
/// in training writes its statistics and does not compute with them.
class ArgumentUse {
 public:
  ArgumentUse(const c10::FunctionSchema& schema, const Node& node);

  bool is_written(const c10::Argument& formal) const;
  /// See Step::unread.
  bool is_unread(const c10::Argument& formal) const;

 private:
  const c10::FunctionSchema& schema_;
  std::optional<bool> in_training_; // none if a node computes it
  bool returns_arguments_ = false;
};

/// The weight that a result of the step is, because the step writes to it in
/// place and returns it. None for other results.
std::optional<Source> weight_written_to(const Step& step, size_t result);

} // namespace tessera::exported
