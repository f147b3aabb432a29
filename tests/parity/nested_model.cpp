#include "parity/nested_model.h"

#include <algorithm>

#include "parity/support.h"

namespace tessera::parity {

using torch::nn::Linear;
using torch::nn::ReLU;

BiasImpl::BiasImpl(int64_t dim) {
  torch::manual_seed(0);
  bias = register_parameter("bias", torch::randn({dim}));
}

at::Tensor BiasImpl::forward(const at::Tensor& x) {
  return x + bias;
}

at::Tensor Block::run(const at::Tensor& x) {
  return bias_module1(torch::relu(bias_module0(x.matmul(weight))));
}

BlockAImpl::BlockAImpl(int64_t in, int64_t out) {
  torch::manual_seed(0);
  bias_module0 = register_module("bias_module0", Bias(out));
  weight = register_parameter("weight", torch::randn({in, out}));
  bias_module1 = register_module("bias_module1", Bias(out));
}

BlockBImpl::BlockBImpl(int64_t in, int64_t out) {
  torch::manual_seed(0);
  weight = register_parameter("weight", torch::randn({in, out}));
  bias_module0 = register_module("bias_module0", Bias(out));
  bias_module1 = register_module("bias_module1", Bias(out));
}

NestedModelImpl::NestedModelImpl() {
  block0 = register_module("block0", BlockB(5, 3));
  block1 = register_module("block1", BlockB(3, 7));
  bias = register_parameter("bias", torch::randn({5}));
  block2 = register_module(
      "block2", Chain(BlockA(7, 9), BlockA(9, 9), BlockB(9, 5)));
}

at::Tensor NestedModelImpl::forward(const at::Tensor& x) {
  const at::Tensor y = torch::relu(block1(torch::relu(block0(x))));
  return torch::relu(block2->forward(y)) + bias;
}

at::Tensor NestedModelImpl::input() {
  return torch::randn({8, 5});
}

namespace {

void wrap_with_last(
    NestedModelImpl& model,
    const FSDPOptions& options,
    const FSDPOptions& last) {
  fsdp(model.block1->bias_module0.ptr(), options);
  fsdp(model.block1.ptr(), options);
  const auto middle = model.block2->ptr<BlockAImpl>(1);
  fsdp(middle->bias_module0.ptr(), options);
  fsdp(middle->bias_module1.ptr(), options);
  fsdp(middle, options);
  fsdp(model.block2->ptr(2), last);
}

} // namespace

void wrap(NestedModelImpl& model, const FSDPOptions& options) {
  wrap_with_last(model, options, options);
}

void wrap_ignoring_a_bias(NestedModelImpl& model) {
  const auto ignored = model.block2->ptr<BlockBImpl>(2)->bias_module0.ptr();
  wrap_with_last(model, {}, FSDPOptions().ignored_modules({ignored}));
}

void wrap_alt(NestedModelImpl& model, const FSDPOptions& options) {
  fsdp(model.block0->bias_module0.ptr(), options);
  fsdp(model.block0.ptr(), options);
}

at::Tensor register_unmanaged_param(torch::nn::Module& module) {
  const at::Device device = module.parameters().front().device();
  return module.register_parameter(
      "unmanaged_param", torch::randn({5, 5}).to(device));
}

void add_unmanaged_param_entry(
    StateDict& osd,
    const at::Tensor& param,
    double step) {
  StateList& ids =
      osd.at("param_groups").list().at(0).dict().at("params").list();
  int64_t id = 0; // the first that is missing, or the next after the last
  while (static_cast<size_t>(id) < ids.size() && ids[id].to_int() == id) {
    ++id;
  }
  StateDict& state = osd.at("state").dict();
  const at::Device device =
      state.begin()->second.dict().begin()->second.tensor().device();
  state.set(
      id,
      StateDict{
          {"step", torch::tensor(static_cast<float>(step)).to(device)},
          {"exp_avg", torch::randn(param.sizes()).to(device)},
          {"exp_avg_sq", torch::randn(param.sizes()).to(device)}});
  ids.insert(ids.begin() + id, StateValue(id));
}

DummyModelImpl::DummyModelImpl(bool no_grad) {
  torch::manual_seed(0);
  net1 = register_module("net1", Chain(Linear(8, 16), ReLU()));
  for (const at::Tensor& parameter : net1->parameters()) {
    parameter.set_requires_grad(!no_grad);
  }
  net2 = register_module("net2", Chain(Linear(16, 32), ReLU()));
  net3 = register_module("net3", Linear(32, 64));
  net4 = register_module("net4", Chain(ReLU(), Linear(64, 8)));
}

at::Tensor DummyModelImpl::forward(const at::Tensor& x) {
  return net4->forward(net3(net2->forward(net1->forward(x))));
}

torch::nn::LinearImpl& DummyModelImpl::first_linear() {
  return *net1->ptr<torch::nn::LinearImpl>(0);
}

at::Tensor DummyModelImpl::input() {
  return torch::rand({8, 8});
}

} // namespace tessera::parity
