// A tensor that has a tape in place of memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Storage.h>

#include <memory>
#include <vector>

#include "deferred/tape.h"

namespace tessera::deferred {

/// [Note: deferred tensors]
///
/// A deferred tensor is a meta tensor whose storage carries, in place of
/// memory, its number and shared ownership of the tape on which operators are
/// recorded. It is identified by that storage: the factories of torch:: re-wrap
/// what they get, so the TensorImpl changes. The tape holds no deferred
/// tensors, only numbers and shapes: it dies with the last deferred tensor.
///
/// A guard includes one dispatch key for its thread, which sorts above
/// autograd. The fallback for that key sees every operator that the thread
/// calls, and sends factories to the meta device. Deferred tensors carry the
/// key too, so that operators are recorded after the guard as well. Only what
/// the user calls is recorded: the key is off inside an operator.
///
/// The key is one that LibTorch sets aside for tests of such modes.
inline constexpr c10::DispatchKey kDeferredKey =
    c10::DispatchKey::TESTING_ONLY_GenericMode;

/// The error for code that reads values of a deferred tensor.
inline constexpr const char* kNoValues =
    "a deferred tensor has no values yet, but this operation needs them. Construct the model without DeferredInit, or do this after materialize() or sharding.";

/// The contents of a deferred storage in place of memory.
struct Deferred {
  std::shared_ptr<Tape> tape;
  StorageId id;
};

/// Null if the tensor is not deferred or undefined.
const Deferred* find_deferred(const at::Tensor& tensor);
const Deferred* find_deferred(const c10::Storage& storage);

TensorRef ref_to(const at::Tensor& deferred);

/// Turns a new meta tensor into a deferred one, which will be on `device`.
void defer(
    const at::Tensor& meta,
    const std::shared_ptr<Tape>& tape,
    at::Device device);

/// Makes the fallback see the tensor without a guard.
void add_deferred_key(const at::Tensor& deferred);

/// Replaces the contents of `tensor` with those of `data`, as set_data() does;
/// set_data() itself refuses to do so between the meta device and others. The
/// gradient's history stays.
void replace_data(const at::Tensor& tensor, const at::Tensor& data);

/// While it lives, pointers into the storages may be asked for: meta kernels
/// compare them to see whether arguments overlap.
class AllowPointers {
 public:
  AllowPointers() = default;
  ~AllowPointers();
  AllowPointers(const AllowPointers&) = delete;
  AllowPointers& operator=(const AllowPointers&) = delete;

  void add(const c10::Storage& deferred);

 private:
  std::vector<c10::Storage> storages_;
};

} // namespace tessera::deferred
