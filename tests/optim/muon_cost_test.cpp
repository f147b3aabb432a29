// What a step of Muon on shards costs: exchanges and memory.
#include <string>

#include "comm/diagnostics/observer.h"
#include "optim/matrix_plan.h"
#include "optim/muon_model.h"
#include "support/memory_meter.h"
#include "support/ranks.h"

namespace tessera::optim {
namespace {

using tessera::testing::MemoryMeter;
using tessera::testing::on_ranks;

TEST(MuonCostTest, IssuesExactlyTwoExchangesForEachBatch) {
  on_ranks(3, [](const Group& world) {
    Matrices model;
    shard(model, {});
    Muon muon(parameters(model));
    muon.set_batch_bytes(200);
    set_sharded_gradients(model, world, 0);
    std::vector<MatrixShape> shapes;
    for (const auto& shape : matrix_shapes()) {
      shapes.push_back({shape[0], shape[1], MuonOptions().ns_steps()});
    }
    const auto num_batches = plan_matrices(shapes, 3, 100).batches.size();
    ASSERT_GT(num_batches, 2);

    size_t num_exchanges = 0;
    size_t num_others = 0;
    {
      const comm::CallWatch watch([&](const comm::CallEvent& event) {
        if (event.kind == comm::CallEvent::Kind::Starts) {
          const bool is_exchange =
              std::string(event.call.operation) == "all_to_all";
          ++(is_exchange ? num_exchanges : num_others);
        }
      });
      muon.step();
    }
    EXPECT_EQ(num_exchanges, 2 * num_batches);
    // Whether a rank failed, and whether all are to do the same.
    EXPECT_EQ(num_others, 2);
  });
}

TEST(MuonCostTest, PeaksBelowThreeBatchesAndWhatOneMatrixTakes) {
  constexpr int kMatrices = 24;
  constexpr size_t kMatrixBytes = size_t{2} * 128 * 256; // in bfloat16
  on_ranks(2, [&](const Group&) {
    torch::manual_seed(0);
    torch::nn::Sequential model;
    for (int i = 0; i < kMatrices; ++i) {
      model->push_back(
          torch::nn::Linear(torch::nn::LinearOptions(256, 128).bias(false)));
    }
    fully_shard(model, FullyShardOptions().layout(ShardLayout::Dim0));
    Muon muon(parameters(model));
    muon.set_batch_bytes(kMatrixBytes);
    for (const at::Tensor& param : parameters(model)) {
      param.mutable_grad() = torch::randn(param.sizes());
    }
    muon.step(); // makes the momentum
    const MemoryMeter meter;
    muon.step();
    // A batch has a matrix of this rank's own, and half of it and of the
    // other's; the iteration has a few matrices more.
    EXPECT_LE(meter.peak_bytes(), 3 * 2 * kMatrixBytes + 6 * kMatrixBytes);
  });
}

} // namespace
} // namespace tessera::optim
