// Shards that are kept in the compute dtype too.
#include <tessera/fsdp/fsdp.h>
#include <tessera/optim/adamw.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "engine/module_units.h"
#include "engine/unit.h"
#include "fsdp/training.h"
#include "support/device.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::HasSubstr;

struct Case {
  ShardLayout layout;
  bool reshards;
  int64_t copies; // of the model
};

const Case kCases[] = {
    {ShardLayout::Flat, true, 1},
    {ShardLayout::Flat, false, 1},
    {ShardLayout::Dim0, true, 1},
    {ShardLayout::Dim0, false, 1},
    {ShardLayout::Flat, true, 2},
};

FullyShardOptions options_of(const Case& each, const Group& world, bool kept) {
  auto options = FullyShardOptions()
                     .layout(each.layout)
                     .reshard_after_forward(each.reshards)
                     .mp_policy(MixedPrecisionPolicy()
                                    .param_dtype(at::kBFloat16)
                                    .reduce_dtype(at::kFloat)
                                    .keep_cast_shards(kept));
  if (each.copies > 1) {
    options.mesh(make_mesh({each.copies, world.size() / each.copies}));
  }
  return options;
}

/// A stack, its AdamW, and what a loop does beside training.
struct Trainee {
  Trainee(const Case& each, const Group& world, bool kept) {
    torch::manual_seed(3);
    model = Stack(kVocabulary, kWidth, kDepth);
    model->to(test_device(), at::kFloat);
    shard_blocks(model, options_of(each, world, kept));
    optimizer = std::make_unique<optim::AdamW>(parameters(model), 0.05);
  }

  at::Tensor train(const at::Tensor& batch, int micro_batches) {
    at::Tensor sum = torch::zeros({});
    for (int i = 0; i < micro_batches; ++i) {
      set_requires_gradient_sync(model, i + 1 == micro_batches);
      const auto loss = loss_of(model, batch + i);
      loss.backward();
      sum = sum + loss.detach().to(at::kFloat);
    }
    optimizer->step();
    optimizer->zero_grad();
    return sum;
  }
  at::Tensor evaluate(const at::Tensor& batch) {
    const at::NoGradGuard no_grad;
    return loss_of(model, batch);
  }
  void halve() {
    const at::NoGradGuard no_grad;
    for (at::Tensor& leaf : parameters(model)) {
      leaf.mul_(0.5);
    }
  }
  void edit() {
    auto guard = summon_full_params(model);
    const at::NoGradGuard no_grad;
    model->head.add_(0.25);
    guard.close();
  }

  Stack model{nullptr};
  std::unique_ptr<optim::AdamW> optimizer;
};

class KeptCastsTest : public ::testing::TestWithParam<int> {};

/// Every value is that of the same model without kept casts, to the last bit:
/// after steps, accumulations, evaluations, writes by hand and summons.
TEST_P(KeptCastsTest, TrainAsWithoutThem) {
  on_ranks(GetParam(), [](const Group& world) {
    for (const Case& each : kCases) {
      if (world.size() % each.copies != 0) {
        continue;
      }
      Trainee plain(each, world, false);
      Trainee kept(each, world, true);
      for (int step = 0; step < 6; ++step) {
        const auto batch =
            tokens(world.rank(), step).remainder(kVocabulary - 2);
        const int micro_batches = step == 3 ? 2 : 1;
        ASSERT_TRUE(torch::equal(
            kept.train(batch, micro_batches),
            plain.train(batch, micro_batches)))
            << "step " << step;
        ASSERT_TRUE(torch::equal(kept.evaluate(batch), plain.evaluate(batch)));
        if (step == 1) {
          kept.halve();
          plain.halve();
        } else if (step == 2) {
          kept.edit();
          plain.edit();
        }
      }
      const auto expected = parameters(plain.model);
      const auto values = parameters(kept.model);
      for (size_t i = 0; i < values.size(); ++i) {
        EXPECT_TRUE(torch::equal(values[i], expected[i]));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, KeptCastsTest, ::testing::Values(1, 2, 3, 4));

/// One rank has all there is to gather: the full parameters are the kept cast.
TEST(KeptCasts, AreWhatOneRankGathers) {
  on_ranks(1, [](const Group& world) {
    for (const bool kept : {false, true}) {
      Trainee trainee(kCases[0], world, kept);
      trainee.evaluate(tokens(0, 0));
      for (const auto& unit : engine::units_in(*trainee.model)) {
        for (const engine::Bundle& bundle : unit->bundles()) {
          EXPECT_EQ(bundle.shows_shard(), kept);
          EXPECT_EQ(
              bundle.full_bytes_now() >=
                  static_cast<size_t>(bundle.shard().numel()) * 2,
              kept || unit->state() == engine::UnitState::Full);
        }
      }
    }
  });
}

TEST(KeptCasts, ARequestWithoutACastIsRefused) {
  on_ranks(2, [](const Group&) {
    const auto refusal = [](const FullyShardOptions& options) {
      torch::nn::Linear linear(4, 4);
      return error_of([&] { fully_shard(*linear, options); });
    };
    EXPECT_THAT(
        refusal(FullyShardOptions().mp_policy(
            MixedPrecisionPolicy().keep_cast_shards(true))),
        HasSubstr("needs param_dtype"));
    EXPECT_THAT(
        refusal(FullyShardOptions()
                    .offload_policy(CPUOffloadPolicy())
                    .mp_policy(MixedPrecisionPolicy()
                                   .param_dtype(at::kBFloat16)
                                   .keep_cast_shards(true))),
        HasSubstr("Choose one of the two"));
    torch::nn::Linear linear(4, 4);
    const FSDP handle(
        linear,
        FSDPOptions().use_orig_params(true).mixed_precision(
            MixedPrecision()
                .param_dtype(at::kBFloat16)
                .keep_cast_shards(true)));
    EXPECT_EQ(
        linear->forward(torch::ones({1, 4})).scalar_type(), at::kBFloat16);
  });
}

/// Writes that leave no trace: of one rank's whole copy even the values are no
/// trace, since the shown parameter is the shard itself.
TEST(KeptCasts, ASummonEndsThem) {
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [](const Group& world) {
      for (const Case& each : kCases) {
        if (world.size() % each.copies != 0) {
          continue;
        }
        Trainee plain(each, world, false);
        Trainee kept(each, world, true);
        for (Trainee* trainee : {&plain, &kept}) {
          trainee->evaluate(tokens(0, 0));
          auto guard = summon_full_params(trainee->model);
          trainee->model->head.data().fill_(0.5);
          guard.close();
        }
        EXPECT_TRUE(torch::equal(
            kept.evaluate(tokens(0, 0)), plain.evaluate(tokens(0, 0))));
      }
    });
  }
}

/// The gather that the operator itself starts is one of what was there before.
TEST(KeptCasts, AnOperatorMayWriteAShardAndReadAParameter) {
  on_ranks(2, [](const Group& world) {
    torch::nn::Linear model(torch::nn::LinearOptions(4, 2).bias(false));
    const at::NoGradGuard no_grad;
    model->weight.fill_(1);
    fully_shard(*model, options_of(kCases[0], world, true));
    const at::Tensor leaf = parameters(model).front();
    leaf.fill_(2);
    for (const bool is_full : {false, true}) {
      (is_full ? unshard : reshard)(*model);
      const float before = model->weight.sum().item<float>() / 8;
      if (!is_full) {
        reshard(*model);
      }
      leaf.add_(model->weight.view({-1}).narrow(0, 0, leaf.numel()));
      reshard(*model);
      EXPECT_EQ(model->weight.sum().item<float>() / 8, 2 * before);
    }
  });
}

/// A gather between the two would keep what was there before.
TEST(KeptCasts, ACollectiveWritesWhenItIsWaitedFor) {
  on_ranks(2, [](const Group& world) {
    torch::nn::Linear model(torch::nn::LinearOptions(64, 32).bias(false));
    fully_shard(*model, options_of(kCases[0], world, true));
    const at::NoGradGuard no_grad;
    const at::Tensor leaf = parameters(model).front();
    leaf.fill_(1);
    Work reduction = world.all_reduce_async(leaf, ReduceOp::Sum);
    model->weight.sum();
    reduction.wait();
    reshard(*model);
    EXPECT_EQ(model->weight.sum().item<float>(), 2 * 64 * 32);
  });
}

/// A unit counts the writes to its model, and begins to count anew when it
/// becomes part of a larger one.
TEST(WrittenBeforeAdoptionTest, AUnitIsGatheredAgain) {
  on_ranks(2, [](const Group&) {
    torch::manual_seed(1);
    torch::nn::Sequential model(
        torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    auto& block = *model[0]->as<torch::nn::Linear>();
    const at::NoGradGuard no_grad;
    const auto x = torch::ones({1, 4});
    fully_shard(block, FullyShardOptions().reshard_after_forward(false));
    const auto before = block.forward(x).clone();
    for (at::Tensor& leaf : parameters(block)) {
      leaf.mul_(2);
    }
    fully_shard(*model);
    EXPECT_TRUE(torch::equal(block.forward(x), before * 2));
  });
}

} // namespace
} // namespace tessera
