// test/distributed/fsdp/test_fsdp_unshard_params.py: suites are its classes,
// tests its methods. "sharded": the world has two ranks, else one, where FSDP
// shards nothing.
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/fsdp/fsdp.h>

#include "parity/models.h"
#include "parity/support.h"
#include "support/device.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using parity::expect_throws;
using parity::is_close;
using parity::kBooleans;
using parity::LeafRuns;
using parity::make_nested_wrapped;
using parity::make_recursive_transformer;
using parity::make_transformer;
using parity::text;
using tessera::testing::on_ranks;
using tessera::testing::test_device;
using torch::nn::Linear;
using torch::nn::LinearOptions;
using torch::nn::Sequential;

MixedPrecision half_precision(bool on) {
  return on ? MixedPrecision().param_dtype(at::kHalf) : MixedPrecision();
}

/// Linear(5,5) inside, Linear(5,3) outside, both units.
struct TwoLayers {
  explicit TwoLayers(const FSDPOptions& options)
      : model(
            Linear(LinearOptions(5, 5).bias(false)),
            Linear(LinearOptions(5, 3).bias(false))) {
    model->to(test_device());
    parity::fsdp(model->ptr(0), options);
    parity::fsdp(model.ptr(), options);
    const auto units = fsdp_units(*model);
    outer = units.at(0).inner();
    inner = units.at(1).inner();
  }
  FSDPUnit outer_unit() {
    return {outer, *model};
  }
  FSDPUnit inner_unit() {
    return {inner, *model->ptr(0)};
  }

  Sequential model;
  std::shared_ptr<const FSDPUnit::Inner> outer;
  std::shared_ptr<const FSDPUnit::Inner> inner;
};

std::shared_ptr<parity::NestedWrappedModuleImpl> make_recursive_nested(
    const FSDPOptions& options) {
  auto model = make_nested_wrapped();
  model->to(test_device());
  auto inner = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(
      model->module->ptr(1));
  parity::fsdp(inner->ptr(0), options);
  parity::fsdp(inner, options);
  parity::fsdp(model->module->ptr(2), options);
  return model.ptr();
}

at::Tensor first_element(const at::Tensor& tensor) {
  return tensor.detach().reshape({-1})[0];
}

// --- test_unshard_params_writeback

void check_writeback(
    const Group& world,
    bool writeback,
    bool check_outer,
    const FSDPOptions& options) {
  TwoLayers layers(options);
  Sequential& model = layers.model;
  const at::Tensor outer_param = parameters(*model).at(0);
  const at::Tensor inner_param = parameters(*model->ptr(0)).at(0);
  const at::Tensor& chosen = check_outer ? outer_param : inner_param;
  // With original parameters both are the inner weight.
  EXPECT_EQ(outer_param.is_same(inner_param), options.use_orig_params());
  {
    torch::NoGradGuard no_grad;
    chosen.fill_(world.rank() + 2);
  }
  {
    auto guard =
        summon_full_params(*model, SummonOptions().writeback(writeback));
    torch::NoGradGuard no_grad;
    const auto shown = parameters(*model);
    ASSERT_EQ(shown.size(), 2u);
    for (const at::Tensor& parameter : shown) {
      parameter.zero_();
    }
    guard.close();
  }
  const bool unsharded = world.size() == 1;
  const bool offloads = options.cpu_offload().offload_params();
  const bool persists = writeback || (unsharded && !offloads);
  EXPECT_EQ(
      first_element(chosen).item<double>(), persists ? 0 : world.rank() + 2);
  if (offloads) {
    for (const at::Tensor& parameter : parameters(*model)) {
      EXPECT_TRUE(parameter.is_cpu());
    }
  }
  if (!options.mixed_precision().param_dtype()) {
    // Stronger: what a forward sees afterwards is what was written.
    torch::NoGradGuard no_grad;
    const auto x = torch::ones({2, 5}, test_device());
    const bool all_zero = model->forward(x).abs().sum().item<double>() == 0;
    EXPECT_EQ(all_zero, persists);
  }
}

void test_writeback(const Group& world) {
  LeafRuns leaves(world);
  for (const bool writeback : kBooleans) {
    for (const bool check_outer : kBooleans) {
      for (const bool half : kBooleans) {
        for (const bool offload : kBooleans) {
          for (const bool orig : kBooleans) {
            leaves.run(
                text("writeback", writeback) + text("outer", check_outer) +
                    text("half", half) + text("offload", offload) +
                    text("orig", orig),
                [&] {
                  check_writeback(
                      world,
                      writeback,
                      check_outer,
                      FSDPOptions()
                          .mixed_precision(half_precision(half))
                          .cpu_offload(CPUOffload().offload_params(offload))
                          .use_orig_params(orig));
                });
          }
        }
      }
    }
  }
}

// --- test_unshard_params_param_data

void check_param_data(
    const Group& world,
    bool rank0_only,
    bool offload_to_cpu,
    const FSDPOptions& options) {
  auto local = make_nested_wrapped();
  local->to(test_device());
  auto model = make_recursive_nested(options);
  for (const FSDPUnit& unit : fsdp_units(*model)) {
    EXPECT_NE(&unit.module(), model.get());
  }
  const std::vector<std::string> unmanaged{
      "module.0.weight", "module.0.bias", "module.3.weight", "module.3.bias"};
  auto guard = summon_full_params(
      *model,
      SummonOptions()
          .rank0_only(rank0_only)
          .writeback(!rank0_only)
          .offload_to_cpu(offload_to_cpu));
  if (!rank0_only || world.rank() == 0) {
    const auto expected = local->named_parameters();
    const auto shown = named_parameters(*model);
    const auto registered = model->parameters();
    ASSERT_EQ(shown.size(), 10u);
    ASSERT_EQ(expected.size(), 10u);
    for (size_t i = 0; i < shown.size(); ++i) {
      const auto& [name, tensor] = shown[i];
      SCOPED_TRACE(name);
      EXPECT_EQ(name, expected[i].key());
      const at::Tensor& plain = expected[i].value();
      EXPECT_EQ(tensor.sizes(), plain.sizes());
      EXPECT_EQ(tensor.scalar_type(), plain.scalar_type());
      EXPECT_TRUE(is_close(tensor, plain));
      const bool is_unmanaged =
          std::find(unmanaged.begin(), unmanaged.end(), name) !=
          unmanaged.end();
      EXPECT_EQ(
          tensor.device(),
          offload_to_cpu && !is_unmanaged ? at::Device(at::kCPU)
                                          : plain.device());
      EXPECT_TRUE(tensor.is_leaf());
      EXPECT_TRUE(tensor.requires_grad());
      EXPECT_TRUE(std::any_of(
          registered.begin(), registered.end(), [&](const at::Tensor& other) {
            return other.is_same(tensor);
          }));
    }
  } else {
    const int64_t sharded[] = {136, 40, 34}; // module.1, module.1.0, module.2
    const auto units = fsdp_units(*model);
    ASSERT_EQ(units.size(), 3u);
    for (size_t i = 0; i < units.size(); ++i) {
      EXPECT_EQ(
          units[i].flat_param().numel(),
          units[i].uses_sharded_strategy() ? sharded[i]
                                           : units[i].unsharded_numel());
    }
  }
  guard.close();
  EXPECT_EQ(fsdp_units(*model, /*root_only=*/true).size(), 2u);
}

void test_param_data(
    const Group& world,
    const std::vector<bool>& offloads_to_cpu) {
  LeafRuns leaves(world);
  for (const bool rank0_only : kBooleans) {
    for (const bool offload_to_cpu : offloads_to_cpu) {
      for (const bool offload : kBooleans) {
        for (const bool half : kBooleans) {
          for (const bool orig : kBooleans) {
            leaves.run(
                text("rank0_only", rank0_only) +
                    text("offload_to_cpu", offload_to_cpu) +
                    text("offload", offload) + text("half", half) +
                    text("orig", orig),
                [&] {
                  check_param_data(
                      world,
                      rank0_only,
                      offload_to_cpu,
                      FSDPOptions()
                          .mixed_precision(half_precision(half))
                          .cpu_offload(CPUOffload().offload_params(offload))
                          .use_orig_params(orig));
                });
          }
        }
      }
    }
  }
}

TEST(TestUnshardParams, test_unshard_params_writeback) {
  on_ranks(2, test_writeback);
}

TEST(TestUnshardParams, test_unshard_params_param_data) {
  on_ranks(2, [](const Group& world) {
    test_param_data(world, {false, true});
  });
}

TEST(TestUnshardParams, test_unshard_singleton_param_writeback) {
  on_ranks(2, [](const Group& world) {
    LeafRuns leaves(world);
    leaves.run("", [&] {
      Linear linear(LinearOptions(1, 1).bias(false));
      linear->to(test_device());
      const FSDP model(linear);
      const auto unit = fsdp_units(*model).at(0);
      const at::Tensor flat = parameters(*model).at(0);
      ASSERT_EQ(flat.numel(), 1); // padding on rank 1
      {
        torch::NoGradGuard no_grad;
        flat.fill_(world.rank() + 2);
      }
      auto guard = summon_full_params(*model, SummonOptions().writeback(true));
      EXPECT_EQ(unit.flat_param().numel(), 1);
      {
        torch::NoGradGuard no_grad;
        unit.flat_param().zero_();
      }
      guard.close();
      // Rank 1 keeps what it wrote into its padding.
      EXPECT_EQ(flat.detach()[0].item<double>(), world.rank() == 0 ? 0 : 3);
    });
  });
}

// --- test_unshard_params_respects_reshard

/// Gradients of the second forward and backward, with a summon between them or
/// without.
std::vector<at::Tensor> gradients_of_two_passes(
    const FSDPOptions& options,
    const std::function<SummonGuard(Sequential&)>& summon,
    bool check) {
  torch::manual_seed(7);
  TwoLayers layers(options);
  Sequential& model = layers.model;
  const auto expected = layers.outer_unit().sharded_numel() * 2;
  const bool is_mixed = options.mixed_precision().param_dtype().has_value();
  const auto expect_full = [&](int64_t outer, int64_t inner) {
    if (check) {
      EXPECT_EQ(layers.outer_unit().allocated_numel(), outer);
      EXPECT_EQ(layers.inner_unit().allocated_numel(), inner);
    }
  };
  EXPECT_EQ(expected, 16);
  const auto x = torch::ones({5}, test_device());

  auto output = model->forward(torch::zeros({5}, test_device()));
  expect_full(expected, 0); // the root keeps its parameters
  output.sum().backward();
  expect_full(0, 0);
  for (const at::Tensor& parameter : parameters(*model)) {
    parameter.mutable_grad().reset();
  }

  output = model->forward(x);
  if (summon) {
    summon(model).close();
    // A low-precision copy could not see edits.
    expect_full(is_mixed ? 0 : expected, 0);
  }
  output.sum().backward();
  if (summon) {
    summon(model).close();
  }
  expect_full(0, 0);
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters(*model)) {
    gradients.push_back(parameter.grad());
  }
  return gradients;
}

TEST(TestUnshardParams, test_unshard_params_respects_reshard) {
  on_ranks(2, [](const Group& world) {
    LeafRuns leaves(world);
    for (const bool rank0_only : kBooleans) {
      for (const bool offload_to_cpu : kBooleans) {
        for (const bool half : kBooleans) {
          for (const bool orig : kBooleans) {
            leaves.run(
                text("rank0_only", rank0_only) +
                    text("offload_to_cpu", offload_to_cpu) +
                    text("half", half) + text("orig", orig),
                [&] {
                  const auto options =
                      FSDPOptions()
                          .mixed_precision(half_precision(half))
                          .use_orig_params(orig);
                  const auto with = gradients_of_two_passes(
                      options,
                      [&](Sequential& model) {
                        return summon_full_params(
                            *model,
                            SummonOptions()
                                .rank0_only(rank0_only)
                                .writeback(!rank0_only)
                                .offload_to_cpu(offload_to_cpu));
                      },
                      true);
                  // Stronger: the summon leaves the gradients alone.
                  const auto without =
                      gradients_of_two_passes(options, nullptr, true);
                  ASSERT_EQ(with.size(), without.size());
                  for (size_t i = 0; i < with.size(); ++i) {
                    ASSERT_EQ(with[i].defined(), without[i].defined());
                    if (with[i].defined()) {
                      EXPECT_TRUE(torch::equal(with[i], without[i]));
                    }
                  }
                });
          }
        }
      }
    }
  });
}

TEST(TestUnshardParams, test_unshard_params_recurse) {
  on_ranks(2, [](const Group& world) {
    LeafRuns leaves(world);
    for (const bool recurse : kBooleans) {
      for (const bool unshard_outer : kBooleans) {
        for (const bool half : kBooleans) {
          for (const bool orig : kBooleans) {
            leaves.run(
                text("recurse", recurse) + text("outer", unshard_outer) +
                    text("half", half) + text("orig", orig),
                [&] {
                  TwoLayers layers(FSDPOptions()
                                       .mixed_precision(half_precision(half))
                                       .use_orig_params(orig));
                  const auto outer = layers.outer_unit();
                  const auto inner = layers.inner_unit();
                  EXPECT_EQ(inner.unsharded_numel(), orig ? 26 : 25);
                  EXPECT_EQ(outer.unsharded_numel(), orig ? 16 : 15);
                  EXPECT_EQ(inner.flat_param().numel(), 13);
                  EXPECT_EQ(outer.flat_param().numel(), 8);
                  torch::nn::Module& target =
                      unshard_outer ? *layers.model : *layers.model->ptr(0);
                  auto guard = summon_full_params(
                      target, SummonOptions().recurse(recurse));
                  EXPECT_EQ(
                      outer.flat_param().numel(),
                      unshard_outer ? outer.unsharded_numel() : 8);
                  EXPECT_EQ(
                      inner.flat_param().numel(),
                      recurse || !unshard_outer ? inner.unsharded_numel() : 13);
                  guard.close();
                  EXPECT_EQ(inner.flat_param().numel(), 13);
                  EXPECT_EQ(outer.flat_param().numel(), 8);
                });
          }
        }
      }
    }
  });
}

TEST(TestUnshardParams, test_named_parameters_and_buffers) {
  on_ranks(2, [](const Group& world) {
    LeafRuns leaves(world);
    for (const std::string prefix : {"", "test_prefix"}) {
      for (const bool recurse : kBooleans) {
        leaves.run(prefix + " " + text("recurse", recurse), [&] {
          auto plain = make_nested_wrapped();
          plain->to(test_device());
          plain->register_buffer("buffer", torch::ones({1}, test_device()));
          auto module = make_nested_wrapped();
          module->to(test_device());
          const FSDP model(module);
          model->register_buffer("buffer", torch::ones({1}, test_device()));
          auto guard = summon_full_params(*model);
          // LibTorch's own names of the plain model, with the prefix.
          const auto expect_same =
              [&](const NamedTensors& ours,
                  const torch::OrderedDict<std::string, at::Tensor>& theirs,
                  size_t count) {
                EXPECT_EQ(ours.size(), count);
                ASSERT_EQ(ours.size(), theirs.size());
                for (size_t i = 0; i < ours.size(); ++i) {
                  const std::string& name = theirs[i].key();
                  EXPECT_EQ(
                      ours[i].first,
                      prefix.empty() ? name : prefix + "." + name);
                  EXPECT_TRUE(is_close(ours[i].second, theirs[i].value()))
                      << name;
                }
              };
          expect_same(
              named_parameters(*model, prefix, recurse),
              plain->named_parameters(recurse),
              recurse ? 10 : 0);
          expect_same(
              named_buffers(*model, prefix, recurse),
              plain->named_buffers(recurse),
              1);
          // What LibTorch says of the sharded model, too.
          EXPECT_EQ(
              model->named_parameters(recurse).keys(),
              plain->named_parameters(recurse).keys());
          EXPECT_EQ(
              model->named_buffers(recurse).keys(),
              plain->named_buffers(recurse).keys());
          guard.close();
        });
      }
    }
  });
}

// --- test_with_grads_core

using Reference =
    DistributedDataParallel<parity::TransformerWithSharedParamsImpl>;

std::vector<at::Tensor> defined_gradients(torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& parameter : parameters(module)) {
    if (parameter.grad().defined()) {
      result.push_back(parameter.grad().detach().clone());
    }
  }
  return result;
}

struct GradsCase {
  bool writeback;
  bool offload_to_cpu;
  ShardingStrategy strategy;
};

/// Gradients agree with data parallelism inside. Calls `edit` with each of
/// ours.
void expect_same_gradients(
    Reference& ddp,
    torch::nn::Module& model,
    const SummonOptions& options,
    const std::function<void(const at::Tensor& gradient)>& edit = nullptr) {
  auto guard = summon_full_params(model, options);
  const auto theirs = named_parameters(*ddp);
  const auto ours = named_parameters(model);
  ASSERT_EQ(ours.size(), theirs.size());
  EXPECT_EQ(ours.size(), 68u);
  for (size_t i = 0; i < ours.size(); ++i) {
    SCOPED_TRACE(ours[i].first);
    EXPECT_EQ(ours[i].first, theirs[i].first);
    ASSERT_TRUE(ours[i].second.grad().defined());
    EXPECT_TRUE(is_close(ours[i].second.grad(), theirs[i].second.grad()));
    EXPECT_GT(ours[i].second.grad().abs().max().item<double>(), 0);
    if (edit) {
      edit(ours[i].second.grad());
    }
  }
  guard.close();
}

/// The same, and doubling them lasts if it should.
void check_gradients(
    Reference& ddp,
    torch::nn::Module& model,
    const GradsCase& leaf) {
  const auto old = defined_gradients(model);
  ASSERT_FALSE(old.empty());
  expect_same_gradients(
      ddp,
      model,
      SummonOptions()
          .writeback(leaf.writeback)
          .offload_to_cpu(leaf.offload_to_cpu)
          .with_grads(true),
      [](const at::Tensor& gradient) { gradient.mul_(2); });
  const bool persists = leaf.writeback ||
      (leaf.strategy == ShardingStrategy::NoShard && !leaf.offload_to_cpu);
  const auto now = defined_gradients(model);
  ASSERT_EQ(now.size(), old.size());
  for (size_t i = 0; i < now.size(); ++i) {
    EXPECT_TRUE(is_close(now[i], persists ? old[i] * 2 : old[i]));
  }
  if (persists) {
    for (const auto& [name, parameter] : named_parameters(*ddp)) {
      parameter.grad().mul_(2);
    }
  }
}

struct NamedStrategy {
  const char* name;
  ShardingStrategy strategy;
};

constexpr NamedStrategy kStrategies[] = {
    {"FULL_SHARD", ShardingStrategy::FullShard},
    {"SHARD_GRAD_OP", ShardingStrategy::ShardGradOp},
    {"NO_SHARD", ShardingStrategy::NoShard}};

TEST(TestUnshardParams, test_with_grads_core) {
  on_ranks(2, [](const Group& world) {
    LeafRuns leaves(world);
    for (const bool writeback : kBooleans) {
      for (const bool offload_to_cpu : kBooleans) {
        for (const auto& each : kStrategies) {
          leaves.run(
              text("writeback", writeback) +
                  text("offload_to_cpu", offload_to_cpu) + each.name,
              [&] {
                const ShardingStrategy strategy = each.strategy;
                const GradsCase leaf{writeback, offload_to_cpu, strategy};
                auto plain_module = make_transformer();
                plain_module->to(test_device());
                Reference ddp(plain_module);
                const auto model = make_recursive_transformer(
                    FSDPOptions().sharding_strategy(strategy).use_orig_params(
                        true));
                {
                  auto guard = summon_full_params(*model);
                  const auto shown = named_parameters(*model);
                  const auto plain = named_parameters(*ddp);
                  ASSERT_EQ(shown.size(), plain.size());
                  for (size_t i = 0; i < shown.size(); ++i) {
                    EXPECT_TRUE(
                        torch::allclose(shown[i].second, plain[i].second));
                  }
                  guard.close();
                }
                auto [src, tgt] = model->input();
                src = src.to(test_device());
                tgt = tgt.to(test_device());
                const auto check = [&] {
                  if (offload_to_cpu) {
                    expect_throws<c10::NotImplementedError>(
                        [&] { check_gradients(ddp, *model, leaf); },
                        "is not supported");
                  } else {
                    check_gradients(ddp, *model, leaf);
                  }
                };
                ddp(src, tgt).sum().backward();
                model(src, tgt).sum().backward();
                check();
                // Between forward and backward, too, with graphs that wait.
                const at::Tensor their_output = ddp(src, tgt);
                const at::Tensor our_output = model(src, tgt);
                check();
                // Stronger: these graphs are as good as before.
                EXPECT_TRUE(is_close(our_output, their_output));
                their_output.sum().backward();
                our_output.sum().backward();
                expect_same_gradients(
                    ddp, *model, SummonOptions().with_grads(true));
              });
        }
      }
    }
  });
}

TEST(TestUnshardParams, test_with_grads_none_grads) {
  on_ranks(2, [](const Group& world) {
    LeafRuns leaves(world);
    for (const auto& each : kStrategies) {
      leaves.run(each.name, [&] {
        const auto model =
            make_recursive_transformer(FSDPOptions()
                                           .sharding_strategy(each.strategy)
                                           .use_orig_params(true));
        const auto units = fsdp_units(*model);
        EXPECT_EQ(units.size(), 5u);
        for (const FSDPUnit& unit : units) {
          EXPECT_FALSE(unit.flat_param().grad().defined());
        }
        auto guard =
            summon_full_params(*model, SummonOptions().with_grads(true));
        const auto shown = parameters(*model);
        EXPECT_EQ(shown.size(), 68u);
        for (const at::Tensor& parameter : shown) {
          EXPECT_FALSE(parameter.grad().defined());
        }
        guard.close();
      });
    }
  });
}

TEST(TestUnshardParams, test_unshard_submodule) {
  on_ranks(2, [](const Group& world) {
    LeafRuns leaves(world);
    leaves.run("", [&] {
      Sequential net(
          parity::Chain(Linear(16, 16), Linear(16, 16)),
          parity::Chain(Linear(16, 16), Linear(16, 16)));
      net->to(test_device());
      const FSDP model(
          net,
          FSDPOptions().auto_wrap_policy(module_wrap_policy<Sequential>()));
      torch::nn::Module& inner = *model->ptr(0);
      auto guard = summon_full_params(inner);
      const auto shown = named_parameters(inner);
      EXPECT_EQ(shown.size(), 4u);
      for (const auto& [name, parameter] : shown) {
        EXPECT_THAT(name, ::testing::Not(::testing::HasSubstr("_flat_param")));
      }
      guard.close();
      EXPECT_EQ(named_parameters(inner).at(0).first, "_flat_param");
    });
  });
}

TEST(TestUnshardParamsNoShard, test_unshard_params_writeback_no_shard) {
  on_ranks(1, test_writeback);
}

TEST(TestUnshardParamsNoShard, test_unshard_params_param_data_no_shard) {
  on_ranks(1, [](const Group& world) { test_param_data(world, {false}); });
}

// --- errors

/// Summons its own parameters in its forward.
struct Summoner : torch::nn::Module {
  at::Tensor a = register_parameter("a", torch::zeros({5}));

  at::Tensor forward(const at::Tensor& x) {
    auto guard = summon_full_params(*this);
    guard.close();
    return x + a;
  }
};

TEST(TestUnshardParamsErrors, test_unshard_params_from_forward_raises) {
  on_ranks(2, [](const Group& world) {
    LeafRuns leaves(world);
    leaves.run("", [&] {
      auto summoner = std::make_shared<Summoner>();
      summoner->to(test_device());
      const FSDP model(summoner);
      expect_throws<c10::Error>(
          [&] { model(torch::zeros({5}, test_device())); },
          "Cannot manually unshard parameters during forward/backward");
    });
  });
}

TEST(TestUnshardParamsErrors, test_unshard_params_from_backward_raises) {
  on_ranks(2, [](const Group& world) {
    LeafRuns leaves(world);
    leaves.run("", [&] {
      torch::manual_seed(0);
      Linear linear(2, 1);
      linear->to(test_device());
      const FSDP model(linear);
      const at::Tensor output = model(torch::ones({2}, test_device()));
      EXPECT_TRUE(output.requires_grad());
      output.register_hook([&](const at::Tensor& gradient) {
        summon_full_params(*model).close();
        return gradient;
      });
      expect_throws<c10::Error>(
          [&] { output.backward(); },
          "Cannot manually unshard parameters during forward/backward");
    });
  });
}

TEST(TestUnshardParamsErrors, test_rank0_only_with_writeback_raises) {
  on_ranks(2, [](const Group& world) {
    LeafRuns leaves(world);
    leaves.run("", [&] {
      const auto model = make_recursive_nested({});
      expect_throws<c10::NotImplementedError>(
          [&] {
            summon_full_params(
                *model, SummonOptions().rank0_only(true).writeback(true))
                .close();
          },
          "writeback=True and rank0_only=True is not supported yet");
    });
  });
}

TEST(TestUnshardParamsErrors, test_offload_to_cpu_no_shard_raises) {
  on_ranks(2, [](const Group& world) {
    LeafRuns leaves(world);
    leaves.run("", [&] {
      const auto model = make_recursive_nested(
          FSDPOptions().sharding_strategy(ShardingStrategy::NoShard));
      expect_throws<c10::NotImplementedError>(
          [&] {
            summon_full_params(
                *model, SummonOptions().rank0_only(true).writeback(true))
                .close();
          },
          "is not supported");
      // What the test's name says, which PyTorch's body does not do.
      expect_throws<c10::NotImplementedError>(
          [&] {
            summon_full_params(*model, SummonOptions().offload_to_cpu(true))
                .close();
          },
          "offload_to_cpu=True and NO_SHARD is not supported yet");
    });
  });
}

} // namespace
} // namespace tessera
