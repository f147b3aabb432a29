#include "parity/models.h"

namespace tessera::parity {

using torch::nn::Linear;
using torch::nn::Sequential;

NestedWrappedModuleImpl::NestedWrappedModuleImpl() {
  module = register_module(
      "module",
      Sequential(
          Linear(8, 4),
          Chain(Linear(4, 16), Linear(16, 16)),
          Linear(16, 4),
          Linear(4, 8)));
}

at::Tensor NestedWrappedModuleImpl::forward(const at::Tensor& x) {
  return module->forward(x);
}

at::Tensor NestedWrappedModuleImpl::input(int rank) {
  torch::manual_seed(1 + static_cast<uint64_t>(rank));
  return torch::rand({4, 8});
}

NestedWrappedModule make_nested_wrapped() {
  torch::manual_seed(0);
  return NestedWrappedModule();
}

TiedProjectionImpl::TiedProjectionImpl(const at::Tensor& shared, int64_t out)
    : weight(register_parameter("weight", shared)),
      bias(register_parameter("bias", torch::rand({out}) * 0.5 - 0.25)) {}

at::Tensor TiedProjectionImpl::forward(const at::Tensor& x) {
  return torch::linear(x, weight, bias);
}

TransformerWithSharedParamsImpl::TransformerWithSharedParamsImpl() {
  constexpr int64_t kVocabulary = 23;
  constexpr int64_t kWidth = 16;
  embed_tokens = register_module(
      "embed_tokens", torch::nn::Embedding(kVocabulary, kWidth));
  transformer = register_module(
      "transformer",
      torch::nn::Transformer(torch::nn::TransformerOptions()
                                 .d_model(kWidth)
                                 .nhead(8)
                                 .num_encoder_layers(2)
                                 .num_decoder_layers(2)
                                 .dim_feedforward(8)
                                 .dropout(0.1)));
  output_proj = register_module(
      "output_proj", TiedProjection(embed_tokens->weight, kVocabulary));
  bn = register_module("bn", torch::nn::BatchNorm1d(2));
  vocab_bias = register_buffer("vocab_bias", torch::ones({kWidth}));
  long_buffer =
      register_buffer("long_buffer", torch::zeros({kWidth}, at::kLong));
}

at::Tensor TransformerWithSharedParamsImpl::forward(
    const at::Tensor& src,
    const at::Tensor& tgt) {
  const at::Tensor s =
      embed_tokens(src) + vocab_bias + long_buffer.to(at::kFloat);
  const at::Tensor t = bn(embed_tokens(tgt));
  return output_proj(transformer(s, t));
}

std::pair<at::Tensor, at::Tensor> TransformerWithSharedParamsImpl::input() {
  return {
      torch::arange(12, at::kLong).view({6, 2}),
      torch::arange(8, at::kLong).view({4, 2})};
}

at::Tensor TransformerWithSharedParamsImpl::loss(
    const at::Tensor& output,
    const at::Tensor& tgt) {
  return torch::cross_entropy_loss(
      output.view({-1, output.size(-1)}),
      tgt.reshape({-1}),
      /*weight=*/{},
      at::Reduction::Sum);
}

TransformerWithSharedParams make_transformer() {
  torch::manual_seed(0);
  TransformerWithSharedParams model;
  model->eval();
  return model;
}

MLPImpl::MLPImpl(int64_t dim)
    : in_proj(register_module("in_proj", Linear(dim, 4 * dim))),
      out_proj(register_module("out_proj", Linear(4 * dim, dim))) {}

at::Tensor MLPImpl::forward(const at::Tensor& x) {
  return torch::relu(out_proj(torch::relu(in_proj(x))));
}

Chain make_mlp_stack(int64_t dim, uint64_t seed) {
  torch::manual_seed(seed);
  return Chain(MLP(dim), Chain(MLP(dim), Linear(dim, dim)), MLP(dim));
}

UnitModuleImpl::UnitModuleImpl()
    : l1(register_module("l1", Linear(100, 100))),
      seq(register_module(
          "seq",
          Chain(torch::nn::ReLU(), Linear(100, 100), torch::nn::ReLU()))),
      l2(register_module("l2", Linear(100, 100))) {}

at::Tensor UnitModuleImpl::forward(const at::Tensor& x) {
  return l2(seq->forward(l1(x)));
}

CompositeParamModelImpl::CompositeParamModelImpl()
    : l(register_module("l", Linear(100, 100))),
      u1(register_module("u1", UnitModule())),
      u2(register_module("u2", UnitModule())),
      p(register_parameter("p", torch::randn({100, 100}))) {}

at::Tensor CompositeParamModelImpl::forward(const at::Tensor& x) {
  return u2(u1(l(x))).matmul(p);
}

CompositeParamModel make_composite() {
  torch::manual_seed(0);
  return CompositeParamModel();
}

} // namespace tessera::parity
