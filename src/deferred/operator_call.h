// A call of an operator under recording, and where its results will be.
#pragma once

#include <tessera/error.h>

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string_view>
#include <vector>

#include "deferred/tape.h"

namespace tessera::deferred {

/// A tensor among the arguments.
struct Input {
  Place place;
  at::Tensor tensor;
  bool is_write;
};

/// An operator and what it was called with.
struct OperatorCall {
  OperatorCall(
      const c10::OperatorHandle& operation,
      const torch::jit::Stack& stack);

  /// Whether the operator writes to the argument.
  bool writes(size_t index) const;
  /// Null if the operator has no such argument.
  c10::IValue* argument(const char* name) {
    const auto index = schema.argumentIndexWithName(name);
    return index ? &arguments[*index] : nullptr;
  }

  bool is_random() const {
    return op.hasTag(at::Tag::nondeterministic_seeded);
  }

  [[noreturn]] void fail(std::string_view what) const {
    raise({.call = schema.name()}, what);
  }

  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  torch::jit::Stack arguments;
  std::vector<Input> deferred;
  std::vector<Input> real; // with memory, or on meta but not deferred
};

/// Where a tensor is or will be.
at::Device final_device(const at::Tensor& tensor);

/// Where the results will be: on the requested device, which is written into
/// the arguments with its index, or on that of the other arguments.
at::Device settle_device(OperatorCall& call, const Tape& tape);

/// The generator that the call draws from on `device`.
at::Generator generator_of(const OperatorCall& call, at::Device device);

} // namespace tessera::deferred
