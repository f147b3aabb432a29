// Captured steps of a model that Python exported.
#include <tessera/exported/exported.h>

#include <gtest/gtest.h>

#include <memory>

#include "train/captured/captured_steps.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests

class CapturedExportedTest : public OnARecorder,
                             public ::testing::WithParamInterface<bool> {};

INSTANTIATE_TEST_SUITE_P(
    All,
    CapturedExportedTest,
    ::testing::Bool(),
    [](const auto& test) { return test.param ? "Sharded" : "Plain"; });

TEST_P(CapturedExportedTest, ReplaysEqualEagerSteps) {
  on_ranks(1, [&](const Group&) {
    const auto exported = [&] {
      auto model = load_exported(TESSERA_EXPORTED_DATA "/tiny_llama_like.pt2");
      model->to(test_device());
      if (GetParam()) {
        fully_shard(model->module_at("layers.0"));
        fully_shard(model);
      }
      return model;
    };
    const auto make = [](auto& model, optim::AdamW& optimizer) {
      return [&](const Inputs& inputs) {
        const at::Tensor logits = model->forward(inputs[0]);
        const auto loss = torch::cross_entropy_loss(
            logits.flatten(0, 1), inputs[0].roll(1, 1).flatten());
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
        return loss.detach();
      };
    };
    auto eager = exported();
    auto captured = exported();
    optim::AdamW eager_optimizer(parameters(eager), 0.01);
    optim::AdamW optimizer(parameters(captured), 0.01);
    CapturedStep eager_step(
        eager, {eager_optimizer}, make(eager, eager_optimizer), always_eager());
    CapturedStep step(captured, {optimizer}, make(captured, optimizer));
    for (int i = 0; i < 8; ++i) {
      torch::manual_seed(i);
      const auto ids = torch::randint(256, {2, 8}, torch::kLong);
      ASSERT_TRUE(torch::equal(step({ids}), eager_step({ids}))) << i;
      EXPECT_EQ(step.was_replayed(), i >= 3) << step.eager_reason();
    }
    EXPECT_TRUE(all_equal(parameters(captured), parameters(eager)));
  });
}

} // namespace
} // namespace tessera
