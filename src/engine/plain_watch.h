// Parameters beside units that are not sharded, compared between the ranks.
#pragma once

#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <cstdint>
#include <map>
#include <string>

namespace tessera::engine {

/// [Note: plain parameters]
///
/// A model whose blocks are sharded and whose root is not has parameters whose
/// gradients nobody averages. A unit cannot know of them, so whoever is given
/// the whole model tells: tessera::parameters() and named_parameters(), of
/// which optimizers are made. Their values are compared at the end of each
/// backward, in the exchange that is made there anyway: where a rank's differ,
/// the optimizer has trained them apart, and every rank throws. (Gradients
/// would tell a step sooner, but a program may average those itself, after
/// backward.)
///
/// Ranks may have been told different things, since those calls are not
/// collective: what only some ranks know is not compared.
class PlainWatch {
 public:
  /// Known until it dies. `name` tells parameters apart, the same on all ranks.
  void add(const std::string& name, const at::Tensor& param);

  /// Of the names and values, with two bits to spare; 0 if there is nothing to
  /// compare.
  int64_t digest() const;
  /// Digests differ: throws on all ranks if a value does that several of them
  /// know. Collective.
  void compare(const Group& group) const;

 private:
  using WeakParam =
      c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  std::map<std::string, uint64_t> values() const;

  std::map<std::string, WeakParam> params_;
};

} // namespace tessera::engine
