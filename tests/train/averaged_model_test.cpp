// Averages of sharded parameters, against averages of a whole model.
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/summon.h>
#include <tessera/optim/adamw.h>
#include <tessera/train/averaged_model.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "checkpoint/support.h"
#include "support/device.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;
using testing::TempFolder;
using testing::test_device;

enum class Kind { Plain, Ddp, Flat, Dim0, FsdpFlat, FsdpOriginal };
constexpr Kind kKinds[] = {
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

/// Averages of whole values, written down by hand.
struct ByHand {
  enum class Rule { Ema, Swa };
  Rule rule;
  double decay = 0;
  bool use_buffers = false;
  int64_t count = 0;
  StateDict averages;

  void update(const StateDict& values) {
    for (const auto& [name, value] : values) {
      const at::Tensor now = value.tensor();
      const bool is_buffer = value.is_of_any_rank();
      if (count == 0 || (is_buffer && !use_buffers)) {
        averages.set(name, now.clone());
        continue;
      }
      const at::Tensor before = averages.at(name).tensor();
      const auto n = static_cast<double>(count);
      const at::Tensor after = rule == Rule::Ema
          ? before * decay + now * (1 - decay)
          : before + (now - before) / (n + 1);
      averages.set(name, after.to(now.scalar_type()));
    }
    ++count;
  }
};

constexpr DiffTolerance kRounding{.rtol = 1e-13, .atol = 1e-15};

void check_averages(Kind kind, const Group& world, ByHand by_hand) {
  Model model(kind, world);
  auto options = AveragedModelOptions().use_buffers(by_hand.use_buffers);
  if (by_hand.rule == ByHand::Rule::Ema) {
    options.multi_avg_fn(get_ema_multi_avg_fn(by_hand.decay));
  }
  AveragedModel averaged(model.net, options);
  for (int step = 0; step < 5; ++step) {
    model.step(step);
    averaged.update_parameters();
    by_hand.update(model.full());
  }
  EXPECT_EQ(averaged.n_averaged(), 5);

  const StateDict own = model.full();
  const at::Tensor output = model.output(); // units are full when it is swapped
  Net whole;
  whole->to(at::kDouble);
  whole->to(test_device());
  load_state_dict(whole, by_hand.averages);
  {
    torch::NoGradGuard no_grad;
    whole->eval();
    auto swapped = averaged.swap_in();
    EXPECT_TRUE(averaged.is_swapped_in());
    EXPECT_EQ(diff_state_dicts(model.full(), by_hand.averages, kRounding), "");
    EXPECT_TRUE(torch::allclose(
        model.output(), whole->forward(Model::data(0)), 1e-12, 1e-14));
    EXPECT_FALSE(torch::equal(model.output(), output));
  }
  EXPECT_FALSE(averaged.is_swapped_in());
  EXPECT_EQ(diff_state_dicts(model.full(), own), ""); // bit by bit
  EXPECT_TRUE(torch::equal(model.output(), output));

  // Training goes on from the model's own values.
  Model other(kind, world);
  for (int step = 0; step < 6; ++step) {
    other.step(step);
  }
  model.step(5);
  EXPECT_EQ(diff_state_dicts(model.full(), other.full()), "");
}

class AveragedModelRanksTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(
    Size,
    AveragedModelRanksTest,
    ::testing::Values(1, 2, 4));

TEST_P(AveragedModelRanksTest, MatchesSingleProcess) {
  on_ranks(GetParam(), [](const Group& world) {
    for (const Kind kind : kKinds) {
      SCOPED_TRACE(static_cast<int>(kind));
      check_averages(kind, world, {ByHand::Rule::Ema, 0.75});
      check_averages(kind, world, {ByHand::Rule::Swa});
      check_averages(kind, world, {ByHand::Rule::Ema, 0.5, true});
      check_averages(kind, world, {ByHand::Rule::Swa, 0, true});
    }
  });
}

TEST(AveragedModelTest, AnExceptionSwapsBack) {
  on_ranks(2, [](const Group& world) {
    for (const Kind kind : kKinds) {
      SCOPED_TRACE(static_cast<int>(kind));
      Model model(kind, world);
      AveragedModel averaged(model.net);
      averaged.update_parameters();
      model.step(0);
      const StateDict own = model.full();
      const std::string error = error_of([&] {
        const auto swapped = averaged.swap_in();
        EXPECT_NE(diff_state_dicts(model.full(), own), "");
        model.output();
        throw std::runtime_error("evaluation failed");
      });
      EXPECT_EQ(error, "evaluation failed");
      EXPECT_EQ(diff_state_dicts(model.full(), own), "");
      EXPECT_FALSE(averaged.is_swapped_in());
    }
  });
}

TEST(AveragedModelTest, CloseEndsTheScopeOnce) {
  on_ranks(2, [](const Group& world) {
    Model model(Kind::Flat, world);
    AveragedModel averaged(model.net);
    model.step(0);
    const StateDict own = model.full();
    auto first = averaged.swap_in();
    auto swapped = std::move(first);
    swapped.close();
    swapped.close();
    first.close(); // NOLINT: was moved from, and does nothing
    EXPECT_EQ(diff_state_dicts(model.full(), own), "");
  });
}

/// The averages as full tensors.
StateDict averages_of(AveragedModel& averaged, Model& model) {
  const auto swapped = averaged.swap_in();
  return model.full();
}

TEST(AveragedModelTest, GoesFromAnyShardingToAnyOther) {
  on_ranks(4, [](const Group& world) {
    const TempFolder folder(world);
    const auto pair = world.subgroup({0, 1});
    for (const Kind from : kKinds) {
      SCOPED_TRACE(static_cast<int>(from));
      const std::string name = "from_" + std::to_string(static_cast<int>(from));
      std::vector<uint8_t> bytes;
      if (pair) {
        Model model(from, *pair);
        AveragedModel averaged(
            model.net,
            AveragedModelOptions().multi_avg_fn(get_ema_multi_avg_fn(0.5)));
        for (int step = 0; step < 3; ++step) {
          model.step(step);
          averaged.update_parameters();
        }
        checkpoint::save(
            averaged, folder / name, checkpoint::SaveOptions().group(*pair));
        bytes = state_dict_to_bytes(averages_of(averaged, model));
      }
      const StateDict expected =
          state_dict_from_bytes(world.broadcast_bytes(bytes, 0));
      for (const Kind to : kKinds) {
        SCOPED_TRACE(static_cast<int>(to));
        Model model(to, world, /*seed=*/9);
        const StateDict own = model.full();
        AveragedModel averaged(model.net);
        checkpoint::load(averaged, folder / name);
        EXPECT_EQ(averaged.n_averaged(), 3);
        EXPECT_EQ(diff_state_dicts(model.full(), own), "");
        EXPECT_EQ(diff_state_dicts(averages_of(averaged, model), expected), "");

        // The same from a dictionary of full tensors.
        StateDict dict{{"n_averaged", 3}};
        for (const auto& [key, value] : expected) {
          dict.set("module." + key.name(), value);
        }
        AveragedModel other(model.net);
        other.load_state_dict(dict);
        EXPECT_EQ(other.n_averaged(), 3);
        EXPECT_EQ(diff_state_dicts(model.full(), own), "");
        EXPECT_EQ(diff_state_dicts(averages_of(other, model), expected), "");
      }
    }
  });
}

TEST(AveragedModelTest, NamesAreThoseOfPython) {
  on_ranks(2, [](const Group& world) {
    Model model(Kind::FsdpFlat, world);
    AveragedModel averaged(model.net);
    std::vector<std::string> names;
    for (const StateKey& key : averaged.state_dict().keys()) {
      names.push_back(key.name());
    }
    EXPECT_THAT(
        names,
        ::testing::ElementsAre(
            "n_averaged",
            "module.first.weight",
            "module.first.bias",
            "module.norm.weight",
            "module.norm.bias",
            "module.norm.running_mean",
            "module.norm.running_var",
            "module.norm.num_batches_tracked",
            "module.head.weight",
            "module.head.bias"));
    EXPECT_EQ(
        averaged.state_dict().at("n_averaged").tensor().scalar_type(),
        at::kLong);
  });
}

TEST(AveragedModelTest, LoadingRejectsWhatDoesNotFitAndChangesNothing) {
  on_ranks(2, [](const Group& world) {
    Model model(Kind::Dim0, world);
    AveragedModel averaged(model.net);
    averaged.update_parameters();
    model.step(0);
    const StateDict own = model.full();
    const StateDict before = averages_of(averaged, model);
    StateDict changed = averaged.state_dict().clone();
    changed.erase("module.head.bias");
    changed.set("n_averaged", 7);
    EXPECT_THAT(
        error_of([&] { averaged.load_state_dict(changed); }),
        HasSubstr("missing \"head.bias\""));
    changed = averaged.state_dict().clone();
    changed.set("head.bias", 7);
    EXPECT_THAT(
        error_of([&] { averaged.load_state_dict(changed); }),
        HasSubstr("the dictionary has the key \"head.bias\""));
    changed = averaged.state_dict();
    changed.set("module.first.weight", torch::zeros({7, 6}, at::kDouble));
    EXPECT_THAT(
        error_of([&] { averaged.load_state_dict(changed); }),
        HasSubstr("this value was replaced or removed"));
    EXPECT_EQ(averaged.n_averaged(), 1);
    EXPECT_EQ(diff_state_dicts(model.full(), own), "");
    EXPECT_EQ(diff_state_dicts(averages_of(averaged, model), before), "");
  });
}

TEST(AveragedModelTest, RejectsUseAtTheWrongTime) {
  on_ranks(2, [](const Group& world) {
    Model model(Kind::Flat, world);
    AveragedModel averaged(model.net);
    {
      const auto swapped = averaged.swap_in();
      const auto text = HasSubstr("Close the scope of swap_in() first.");
      EXPECT_THAT(error_of([&] { averaged.update_parameters(); }), text);
      EXPECT_THAT(error_of([&] { averaged.state_dict(); }), text);
      EXPECT_THAT(error_of([&] { auto again = averaged.swap_in(); }), text);
    }
    {
      const auto summoned = summon_full_params(model.net);
      EXPECT_THAT(
          error_of([&] { averaged.update_parameters(); }),
          HasSubstr("outside summon_full_params"));
      EXPECT_THAT(
          error_of([&] { AveragedModel inside(model.net); }),
          HasSubstr("inside summon_full_params"));
    }
    averaged.update_parameters();

    Net plain;
    AveragedModel early(plain);
    fully_shard(plain);
    EXPECT_THAT(
        error_of([&] { early.update_parameters(); }),
        HasSubstr("Make the AveragedModel after the model is sharded"));
    EXPECT_THAT(
        error_of([] { get_ema_multi_avg_fn(1.5); }),
        HasSubstr("decay is 1.5, must be from 0 to 1."));
  });
}

TEST(AveragedModelTest, KeepsNoMoreThanTheShardsOfARank) {
  on_ranks(4, [](const Group& world) {
    Model model(Kind::Flat, world);
    AveragedModel averaged(model.net);
    int64_t numel = 0;
    for (const at::Tensor& shard : parameters(model.net)) {
      numel += shard.numel();
    }
    int64_t kept = 0;
    for (const auto& [key, value] : averaged.state_dict()) {
      kept += value.is_sharded() ? value.sharded().local_numel() : 0;
    }
    EXPECT_EQ(kept, numel);
    EXPECT_LT(kept, 6 * 7 + 7 + 7 + 7 + 7 + 1);
  });
}

} // namespace
} // namespace tessera
