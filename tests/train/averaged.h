// Models of every kind that averages are made of.
#pragma once

#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/optim/adamw.h>
#include <tessera/train/averaged_model.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <torch/torch.h>

#include <memory>
#include <optional>

#include "support/device.h"

namespace tessera::testing {

enum class Kind { Plain, Ddp, Flat, Dim0, FsdpFlat, FsdpOriginal };
inline constexpr Kind kKinds[] = {
    Kind::Plain,
    Kind::Ddp,
    Kind::Flat,
    Kind::Dim0,
    Kind::FsdpFlat,
    Kind::FsdpOriginal};

/// Sizes that ranks cannot share evenly: some ranks have no part of the head.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(6, 7));
    norm = register_module("norm", torch::nn::BatchNorm1d(7));
    head = register_module("head", torch::nn::Linear(7, 1));
  }
  at::Tensor forward(const at::Tensor& x) {
    return head(torch::relu(norm(first(x))));
  }
  torch::nn::Linear first{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

/// A model in double, spread over the ranks of a group.
struct Model {
  Model(Kind kind, const Group& group, uint64_t seed = 1) {
    torch::manual_seed(seed);
    net = Net();
    net->to(at::kDouble);
    net->to(test_device());
    if (kind == Kind::Ddp) {
      ddp.emplace(net, DDPOptions().process_group(group));
    } else if (kind == Kind::Flat || kind == Kind::Dim0) {
      const auto options = FullyShardOptions().group(group).layout(
          kind == Kind::Flat ? ShardLayout::Flat : ShardLayout::Dim0);
      fully_shard(net->first, options);
      fully_shard(net, options);
    } else if (kind != Kind::Plain) {
      fsdp.emplace(
          net,
          FSDPOptions().process_group(group).use_orig_params(
              kind == Kind::FsdpOriginal));
    }
    optimizer = std::make_unique<optim::AdamW>(parameters(net), 0.05);
  }

  /// The same data on every rank, so that every kind trains alike.
  void step(int number) {
    optimizer->zero_grad();
    forward(data(number)).square().mean().backward();
    optimizer->step();
  }

  at::Tensor forward(const at::Tensor& x) {
    if (ddp) {
      return (*ddp)(x);
    }
    return fsdp ? (*fsdp)(x) : net->forward(x);
  }

  static at::Tensor data(int number) {
    torch::manual_seed(100 + number);
    return torch::randn({8, 6}, at::kDouble).to(test_device());
  }

  /// The output in evaluation, which gathers units.
  at::Tensor output() {
    torch::NoGradGuard no_grad;
    net->eval();
    const at::Tensor result = forward(data(0)).clone();
    net->train();
    return result;
  }

  /// Whole values by name, buffers included.
  StateDict full() {
    return get_model_state_dict(net, StateDictOptions().full_state_dict(true))
        .clone();
  }

  Net net{nullptr};
  std::optional<DistributedDataParallel<NetImpl>> ddp;
  std::optional<FSDP<NetImpl>> fsdp;
  std::unique_ptr<optim::AdamW> optimizer;
};

/// The averages as full tensors.
inline StateDict averages_of(AveragedModel& averaged, Model& model) {
  const auto swapped = averaged.swap_in();
  return model.full();
}

} // namespace tessera::testing
