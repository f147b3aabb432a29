// Records what is done to deferred tensors, and repeats it on memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "deferred/rng_record.h"

namespace tessera::deferred {

using StorageId = size_t;

/// A deferred tensor as the tape names it, without holding it.
struct TensorRef {
  StorageId storage = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset = 0;
  at::ScalarType dtype = at::kFloat;
  bool is_conj = false;
  bool is_neg = false;

  bool operator==(const TensorRef&) const = default;

  static TensorRef of(const at::Tensor& tensor, StorageId storage);
};

/// The place of a tensor among the arguments or results of an operator.
struct Place {
  size_t index = 0;
  std::optional<size_t> element; // of a list
};

/// Calls `use(place, tensor)` for each defined tensor among `values`.
template <class Use>
void for_each_tensor(std::span<const c10::IValue> values, const Use& use) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].isTensor()) {
      if (values[i].toTensor().defined()) {
        use(Place{i, std::nullopt}, values[i].toTensor());
      }
    } else if (values[i].isList()) {
      const auto elements = values[i].toListRef();
      for (size_t k = 0; k < elements.size(); ++k) {
        if (elements[k].isTensor() && elements[k].toTensor().defined()) {
          use(Place{i, k}, elements[k].toTensor());
        }
      }
    }
  }
}

/// How many elements of storage a tensor spans from its first to its last.
int64_t extent_of(at::IntArrayRef sizes, at::IntArrayRef strides);

/// A copy in which put() does not change the lists of the original.
torch::jit::Stack copy_values(std::span<const c10::IValue> values);
void put(
    std::span<c10::IValue> values,
    const Place& place,
    const at::Tensor& tensor);

/// [Note: elements overloads]
///
/// An operator that makes a tensor may be able to make some of its elements
/// without the others: one that reads a file, for example. Such an operator has
/// an overload named "elements", with two more arguments at the end:
///
///   (..., int begin, int numel) -> (Tensor, int?)
///
/// It gives these elements of the flattened tensor, and a digest of the whole
/// tensor, or None if the digest is not known. Two calls that have one digest
/// make equal tensors.
struct ReplayedPart {
  at::Tensor elements; // flat
  std::optional<uint64_t> digest_of_whole;
};

/// An operator that made or wrote deferred tensors.
struct Record {
  struct Slot {
    Place place;
    TensorRef tensor;
  };

  c10::OperatorHandle op;
  /// The arguments without the deferred tensors; tensors with memory are
  /// copies.
  torch::jit::Stack arguments;
  std::vector<Slot> inputs;
  std::vector<StorageId> writes; // of inputs
  std::vector<Slot> outputs; // with a storage that this operator made
  at::ScalarType default_dtype = at::kFloat;
  std::optional<RngRecord::Id> draw = std::nullopt;
};

/// The operators on a set of deferred tensors, in the order they were called,
/// all numbered. The tape is owned by the storages of these tensors, so it must
/// not hold any of them.
///
/// To get the values of a tensor, the operators it depends on are repeated: the
/// last one that wrote its storage and, before that, for each storage this
/// operator touched, the last one that had written it by then, and so on. A
/// storage is freed after the last operator that needs it. Views are not
/// recorded: a tensor is found again in its storage by sizes, strides and
/// offset. See also [Note: draws].
///
/// Thread safe.
class Tape {
 public:
  Tape();
  ~Tape();
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  StorageId add_storage(at::Device device);
  at::Device device_of(StorageId storage) const;
  /// The devices of all storages, each once.
  std::vector<at::Device> devices() const;

  /// Records an operator, with the generator that a random operator draws from.
  void append(Record record, const std::optional<at::Generator>& generator);

  /// Tensors with memory and the values that `refs` have at the end of the
  /// tape. All `refs` must have one storage, which the results share.
  std::vector<at::Tensor> replay(std::span<const TensorRef> refs);

  /// Elements [begin, begin + numel) of the flattened tensor that `ref` names,
  /// without the other elements. Nothing unless an operator with an overload
  /// for them made the tensor, and conversions alone followed. See
  /// [Note: elements overloads].
  std::optional<ReplayedPart> replay_part(
      const TensorRef& ref,
      int64_t begin,
      int64_t numel);

  /// Call it before numbers are really drawn: puts the generator into the state
  /// it would have if all operators on the tape had run.
  void catch_up(const at::Generator& generator);

 private:
  using Memory = std::unordered_map<StorageId, c10::Storage>;
  struct StorageInfo {
    at::Device device;
    std::vector<size_t> writers; // records, ascending; the first made it
  };

  // One mutex for all tapes, since they share the generators.
  static inline Mutex mutex_;

  const Record* only_writer(const TensorRef& ref, size_t before) const
      TESSERA_REQUIRES(mutex_);
  void push_writer(StorageId storage, size_t before, std::vector<size_t>& heap)
      const TESSERA_REQUIRES(mutex_);
  std::vector<size_t> records_for(std::vector<size_t> heap) const
      TESSERA_REQUIRES(mutex_);
  Memory run(
      const std::vector<size_t>& plan,
      std::span<const StorageId> keep,
      GeneratorStates& states) TESSERA_REQUIRES(mutex_);
  void run_missing_draws(RngRecord::Id draw, GeneratorStates& states)
      TESSERA_REQUIRES(mutex_);
  void run_draw(RngRecord::Id draw, GeneratorStates& states)
      TESSERA_REQUIRES(mutex_);
  void execute(size_t record, Memory& memory, GeneratorStates& states)
      TESSERA_REQUIRES(mutex_);

  std::vector<StorageInfo> storages_ TESSERA_GUARDED_BY(mutex_);
  std::vector<at::Device> devices_ TESSERA_GUARDED_BY(mutex_);
  std::vector<Record> records_ TESSERA_GUARDED_BY(mutex_);
  RngRecord draws_ TESSERA_GUARDED_BY(mutex_);
};

/// While it lives, operators run as they do for a plain tensor: not recorded,
/// and without the caller's gradients, autocast or inference mode.
struct PlainScope {
  PlainScope();

  c10::impl::ExcludeDispatchKeyGuard not_recorded;
  c10::impl::ExcludeDispatchKeyGuard no_autocast;
  c10::InferenceMode no_inference;
  at::NoGradGuard no_grad;
};

namespace testing {
int64_t num_live_tapes();
} // namespace testing

} // namespace tessera::deferred
