// A small sharded model whose state tests get and load.
#pragma once

#include <tessera/fsdp/fsdp.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/optim/adam.h>
#include <tessera/transfer/distributed_state_dict.h>

#include "fsdp/training.h"

namespace tessera::testing {

inline const auto kFull = StateDictOptions().full_state_dict(true);

/// Two units and a parameter of the root, with a buffer.
struct StateNet : torch::nn::Module {
  StateNet() {
    torch::manual_seed(3);
    a = register_module("a", torch::nn::Linear(5, 7));
    b = register_module("b", torch::nn::Linear(7, 3));
    scale = register_parameter("scale", torch::randn({3}));
    seen = register_buffer("seen", torch::zeros({2}));
  }
  at::Tensor forward(const at::Tensor& x) {
    seen.add_(1);
    return b(torch::relu(a(x))) * scale;
  }

  torch::nn::Linear a{nullptr};
  torch::nn::Linear b{nullptr};
  at::Tensor scale;
  at::Tensor seen;
};

enum class How { Flat, Orig, ShardFlat, ShardDim0 };

inline std::shared_ptr<StateNet> make(How how) {
  auto net = std::make_shared<StateNet>();
  const auto wrap = [&](const std::shared_ptr<torch::nn::Module>& module) {
    if (how == How::Flat || how == How::Orig) {
      FSDP<torch::nn::Module>(
          module, FSDPOptions().use_orig_params(how == How::Orig));
    } else {
      fully_shard(
          *module,
          FullyShardOptions().layout(
              how == How::ShardDim0 ? ShardLayout::Dim0 : ShardLayout::Flat));
    }
  };
  wrap(net->a.ptr());
  wrap(net->b.ptr());
  wrap(net);
  return net;
}

inline optim::Adam train(StateNet& net, int steps = 2) {
  optim::Adam optim(parameters(net), 0.01);
  for (int step = 0; step < steps; ++step) {
    net.forward(torch::ones({4, 5})).square().sum().backward();
    optim.step();
    optim.zero_grad();
  }
  return optim;
}

} // namespace tessera::testing
