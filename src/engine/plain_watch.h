// Compares parameters that are not sharded, in a model with units, between the
// ranks.
#pragma once

#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::engine {

/// [Note: plain parameters]
///
/// A model whose blocks are sharded and whose root is not has parameters whose
/// gradients nobody averages. A unit cannot know them. Two kinds of calls do,
/// and register them:
///
/// - tessera::parameters() and named_parameters() are given the whole model.
/// - An optimizer of tessera::optim may be given shards, and parameters that
/// are
///   not sharded beside them. Such a parameter may belong to another model, or
///   be meant to differ between ranks, and ranks may have their parameters in
///   another order. So it has no name. It goes by the values that it has when
///   the ranks first compare: only parameters that begin with the same values
///   are compared, and where several do, all of these together.
///
/// The values are compared at the end of each backward, in the exchange that is
/// made there anyway: if a rank's values differ, the optimizers have trained
/// them apart, and every rank throws. (Gradients would reveal it a step sooner,
/// but a program may average them itself after backward.)
///
/// Ranks may know different parameters, since those calls are not collective: a
/// parameter that only some ranks know is not compared.
class PlainWatch {
 public:
  /// The parameter is known until it is destroyed, under the first name that it
  /// gets. The name is the same on all ranks; if another parameter has it, the
  /// watch adds a number.
  void add(const std::string& name, const at::Tensor& param);
  /// A parameter that an optimizer steps beside shards, known as long as
  /// `stepped_by`, the optimizer or a part of it, lives. `place` describes the
  /// parameter on this rank.
  void add_stepped(
      const std::string& place,
      const at::Tensor& param,
      const std::weak_ptr<const void>& stepped_by);
  /// Values that are not a parameter's and that every rank must have alike.
  /// They are compared once, with the parameters.
  void add_once(const std::string& name, uint64_t digest);
  void forget_once() {
    once_.clear();
  }

  /// A digest of the names and values, with two bits to spare; 0 if there is
  /// nothing to compare.
  int64_t digest();
  /// Call it if digests differ: throws on all ranks if a parameter that several
  /// ranks know has different values. Collective.
  void compare(const Group& group);

 private:
  using WeakParam =
      c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  class Digests;
  struct Alike;
  struct Stepped {
    std::string place;
    WeakParam param;
    std::weak_ptr<const void> by;
    std::optional<uint64_t> first; // digest of its values
  };

  std::map<std::string, uint64_t> values();
  std::map<uint64_t, Alike> stepped_alike(Digests& digests);
  [[noreturn]] void refuse(
      const Group& group,
      const std::string& name,
      int rank,
      int other);

  std::map<std::string, WeakParam> params_;
  std::vector<Stepped> stepped_;
  std::map<std::string, uint64_t> once_; // see add_once()
};

} // namespace tessera::engine
