// The autograd metadata of a face.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <string>
#include <utility>

namespace tessera::engine {

/// [Note: gradients of faces]
///
/// The gradient of a sharded parameter is that of its leaf: each rank has a
/// part of it. LibTorch asks the metadata of a tensor for its gradient, through
/// virtual functions, so a face can answer for its leaf:
///
/// Code that may change the gradient, such as Module::zero_grad(), gets the
/// leaf's.
///
/// Code that only reads the gradient takes it for the whole gradient: an
/// optimizer that was made before sharding would find no gradient and train
/// nothing, and torch::nn::utils::clip_grad_norm_(module.parameters()) would
/// clip by the norm of one rank's part. Such reads are refused on every rank,
/// whether a rank has a part or not.
///
/// A face that is frozen, shows summoned parameters or retains a gradient of
/// its own has plain metadata: its own gradient.
class FaceMeta : public torch::autograd::AutogradMeta {
 public:
  FaceMeta(std::string name, at::Tensor leaf)
      : parameter_(std::move(name)), leaf_(std::move(leaf)) {}

  at::Tensor& mutable_grad() override {
    return stands_for_leaf() ? leaf_.mutable_grad() : AutogradMeta::grad_;
  }
  const at::Tensor& grad() const override {
    if (stands_for_leaf()) {
      refuse();
    }
    return AutogradMeta::grad_;
  }

 private:
  bool stands_for_leaf() const {
    return static_cast<bool>(grad_fn_) && !retains_grad_;
  }
  [[noreturn]] void refuse() const;

  const std::string parameter_; // below the unit's module
  const at::Tensor leaf_;
};

} // namespace tessera::engine
