// The models of the PyTorch tests, as plain LibTorch modules.
#pragma once

#include <torch/torch.h>

#include <string>
#include <utility>

namespace tessera::parity {

/// A Sequential that can be an element of another: LibTorch's own has no
/// forward of a fixed type.
struct ChainImpl : torch::nn::SequentialImpl {
  using SequentialImpl::SequentialImpl;
  at::Tensor forward(const at::Tensor& x) {
    return SequentialImpl::forward(x);
  }
};
TORCH_MODULE(Chain);

/// Linear(8,4); Sequential(Linear(4,16); Linear(16,16)); Linear(16,4);
/// Linear(4,8), as a child called `module`.
struct NestedWrappedModuleImpl : torch::nn::Module {
  NestedWrappedModuleImpl();
  at::Tensor forward(const at::Tensor& x);
  /// Uniform (4, 8), different on each rank.
  static at::Tensor input(int rank);

  torch::nn::Sequential module{nullptr};
};
TORCH_MODULE(NestedWrappedModule);

/// With seed 0, so that two of them are equal.
NestedWrappedModule make_nested_wrapped();

/// A projection that shares its weight with an embedding: registered under
/// both names, as in Python.
struct TiedProjectionImpl : torch::nn::Module {
  TiedProjectionImpl(const at::Tensor& shared, int64_t out);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;
  at::Tensor bias;
};
TORCH_MODULE(TiedProjection);

/// An encoder-decoder with tied embedding and projection, batch norm and
/// buffers: width 16, vocabulary 23, 68 distinct parameters.
struct TransformerWithSharedParamsImpl : torch::nn::Module {
  TransformerWithSharedParamsImpl();
  at::Tensor forward(const at::Tensor& src, const at::Tensor& tgt);
  /// src (6, 2) and tgt (4, 2), the same on every rank.
  static std::pair<at::Tensor, at::Tensor> input();
  /// Cross entropy against tgt, summed.
  static at::Tensor loss(const at::Tensor& output, const at::Tensor& tgt);

  torch::nn::Embedding embed_tokens{nullptr};
  torch::nn::Transformer transformer{nullptr};
  TiedProjection output_proj{nullptr};
  torch::nn::BatchNorm1d bn{nullptr};
  at::Tensor vocab_bias;
  at::Tensor long_buffer;
};
TORCH_MODULE(TransformerWithSharedParams);

/// With seed 0, in eval mode: no dropout, running statistics.
TransformerWithSharedParams make_transformer();

/// relu(out_proj(relu(in_proj(x)))), four times as wide inside.
struct MLPImpl : torch::nn::Module {
  explicit MLPImpl(int64_t dim);
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear in_proj{nullptr};
  torch::nn::Linear out_proj{nullptr};
};
TORCH_MODULE(MLP);

/// MLP; Sequential(MLP; Linear); MLP, with seed 0: 14 parameters.
Chain make_mlp_stack(int64_t dim, uint64_t seed = 0);

/// l2(seq(l1(x))), with a linear between two relus as `seq`.
struct UnitModuleImpl : torch::nn::Module {
  UnitModuleImpl();
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear l1{nullptr};
  Chain seq{nullptr};
  torch::nn::Linear l2{nullptr};
};
TORCH_MODULE(UnitModule);

/// A linear, two UnitModules and a parameter of its own: 15 parameters.
struct CompositeParamModelImpl : torch::nn::Module {
  CompositeParamModelImpl();
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear l{nullptr};
  UnitModule u1{nullptr};
  UnitModule u2{nullptr};
  at::Tensor p;
};
TORCH_MODULE(CompositeParamModel);

/// With seed 0.
CompositeParamModel make_composite();

} // namespace tessera::parity
