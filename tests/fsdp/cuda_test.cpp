// Sharded training on a GPU: alone, and two ranks that share it.
#include <tessera/fsdp/fully_shard.h>
#include <tessera/optim/adamw.h>

#include "fsdp/models.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using tessera::testing::on_ranks;
using tessera::testing::Stack;

class CudaFullyShardTest : public ::testing::TestWithParam<int> {};

TEST_P(CudaFullyShardTest, TrainingMatchesSingleProcess) {
  on_ranks(GetParam(), [](const Group& world) {
    const auto train = [](Stack& model, const std::vector<at::Tensor>& leaves) {
      optim::AdamW optimizer(leaves, 1e-2);
      for (int step = 0; step < 4; ++step) {
        torch::manual_seed(step); // the same data on every rank
        const auto ids = torch::randint(0, 11, {3, 5}, at::kLong).cuda();
        model->forward(ids).square().mean().backward();
        optimizer.step();
        optimizer.zero_grad();
      }
    };
    const auto make = [] {
      torch::manual_seed(0);
      Stack model(11, 8, 3);
      model->to(at::kDouble);
      model->to(at::Device(at::kCUDA, 0));
      return model;
    };
    auto plain = make();
    train(plain, plain->parameters());
    auto sharded = make();
    for (const auto& block : *sharded->blocks) {
      fully_shard(*block);
    }
    fully_shard(*sharded);
    train(sharded, parameters(*sharded));
    torch::NoGradGuard no_grad;
    const auto expected = plain->named_parameters();
    for (const auto& item : sharded->named_parameters()) {
      const double worst =
          (item.value() - expected[item.key()]).abs().max().item<double>();
      EXPECT_LE(worst, world.size() == 1 ? 0 : 1e-9) << item.key();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaFullyShardTest, ::testing::Values(1, 2));

} // namespace
} // namespace tessera
