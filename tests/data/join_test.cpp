// Loaders whose ranks get different numbers of batches, inside of a Join.
#include <tessera/data/loader.h>
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/ddp/join.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include <gtest/gtest.h>

#include "data/support.h"
#include "support/ranks.h"

namespace tessera::data {
namespace {

using testing::Numbers;
using testing::on_ranks;

torch::nn::Linear one_weight() {
  torch::nn::Linear model(torch::nn::LinearOptions(1, 1).bias(false));
  model->to(torch::kDouble);
  torch::NoGradGuard no_grad;
  model->weight.zero_();
  return model;
}

/// The gradient of a sample's loss is its number, and the weight starts at 0:
/// after an epoch the weight tells the sum of all numbers that were learned.
void learn_every_number_once(const Group& world, int64_t count, bool zero) {
  auto model = one_weight();
  DistributedDataParallel ddp(model);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::vector<Joinable*> joined{&ddp};
  if (zero) {
    auto sharded = std::make_unique<ZeroRedundancyOptimizer>(
        model->parameters(), optimizer_class<torch::optim::SGD>(1.0));
    joined.push_back(sharded.get());
    optimizer = std::move(sharded);
  } else {
    optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), 1.0);
  }
  Loader loader(
      Numbers{.count = count},
      LoaderOptions().batch_size(2).seed(3).epoch_end(EpochEnd::Uneven));
  double expected = 0;
  for (int epoch = 0; epoch < 2; ++epoch) {
    Join::run(joined, [&] {
      while (const auto batch = loader.next()) {
        optimizer->zero_grad();
        ddp(batch->to(torch::kDouble)).sum().backward();
        optimizer->step();
      }
    });
    expected -= static_cast<double>(count * (count - 1) / 2) / world.size();
    EXPECT_DOUBLE_EQ(model->weight.item<double>(), expected) << epoch;
    EXPECT_EQ(loader.position(), (Position{epoch + 1, 0}));
  }
}

TEST(LoaderInAJoinTest, EverySampleCountsOnceThoughRanksHaveUnevenBatches) {
  for (const int size : {2, 4}) {
    on_ranks(size, [](const Group& world) {
      for (const int64_t count : {3, 6, 21, 64}) {
        for (const bool zero : {false, true}) {
          SCOPED_TRACE(count);
          learn_every_number_once(world, count, zero);
        }
      }
    });
  }
}

} // namespace
} // namespace tessera::data
