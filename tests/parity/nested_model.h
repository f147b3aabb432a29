// The models of PyTorch's tests of optimizer state, and how they are wrapped.
#pragma once

#include <tessera/fsdp/fsdp.h>
#include <tessera/state/state_dict.h>

#include <torch/torch.h>

#include "parity/models.h"

namespace tessera::parity {

/// All of these seed the generator when they are built, so that two are equal.
struct BiasImpl : torch::nn::Module {
  explicit BiasImpl(int64_t dim);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor bias;
};
TORCH_MODULE(Bias);

/// Two biases with a relu between them, so that their gradients differ.
struct Block : torch::nn::Module {
  at::Tensor run(const at::Tensor& x);

  at::Tensor weight;
  Bias bias_module0{nullptr};
  Bias bias_module1{nullptr};
};

/// Draws its weight after the first bias.
struct BlockAImpl : Block {
  BlockAImpl(int64_t in, int64_t out);
  at::Tensor forward(const at::Tensor& x) {
    return run(x);
  }
};
TORCH_MODULE(BlockA);

/// Draws its weight first.
struct BlockBImpl : Block {
  BlockBImpl(int64_t in, int64_t out);
  at::Tensor forward(const at::Tensor& x) {
    return run(x);
  }
};
TORCH_MODULE(BlockB);

/// 16 parameters, 296 elements.
struct NestedModelImpl : torch::nn::Module {
  NestedModelImpl();
  at::Tensor forward(const at::Tensor& x);
  /// Standard normal (8, 5).
  static at::Tensor input();

  BlockB block0{nullptr};
  BlockB block1{nullptr};
  at::Tensor bias;
  Chain block2{nullptr};
};
TORCH_MODULE(NestedModel);

/// Makes units of block1, of the last two elements of block2, and of some of
/// their biases; the root stays plain.
void wrap(NestedModelImpl& model, const FSDPOptions& options = {});
/// The same, but block2.2 leaves its bias_module0 alone.
void wrap_ignoring_a_bias(NestedModelImpl& model);
/// Makes units of block0 and its first bias, of nothing else.
void wrap_alt(NestedModelImpl& model, const FSDPOptions& options = {});

/// A parameter (5, 5) that no optimizer state knows.
at::Tensor register_unmanaged_param(torch::nn::Module& module);
/// Gives `osd`, of one group, the entry that it lacks for such a parameter: at
/// the first gap in its ids.
void add_unmanaged_param_entry(
    StateDict& osd,
    const at::Tensor& param,
    double step);

/// Four linears: 8 parameters, 3320 elements.
struct DummyModelImpl : torch::nn::Module {
  /// `no_grad`: net1 is frozen.
  explicit DummyModelImpl(bool no_grad = false);
  at::Tensor forward(const at::Tensor& x);
  torch::nn::LinearImpl& first_linear();
  /// Uniform (8, 8).
  static at::Tensor input();

  Chain net1{nullptr};
  Chain net2{nullptr};
  torch::nn::Linear net3{nullptr};
  Chain net4{nullptr};
};
TORCH_MODULE(DummyModel);

} // namespace tessera::parity
