// One step of Muon on sharded matrices.
//
//   tessera run -n 2 --cpu-threads 1 muon_bench
//
// The matrices of a GPT of width 256 and 6 blocks, cut by rows, each block a
// unit. Beside it: every rank gathers all gradients in bfloat16 and makes the
// whole step itself, and AdamW on the same shards. The limit is the step of one
// process that has all matrices, divided by the ranks: nobody communicates, and
// nobody has more to do than another. The sides take turns within a repeat.
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "harness.h"

namespace {

constexpr int64_t kWidth = 256;
constexpr int kBlocks = 6;
constexpr int kRepeats = 7;

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    register_parameter("qkv", torch::randn({3 * kWidth, kWidth}));
    register_parameter("out", torch::randn({kWidth, kWidth}));
    register_parameter("up", torch::randn({4 * kWidth, kWidth}));
    register_parameter("down", torch::randn({kWidth, 4 * kWidth}));
  }
};
TORCH_MODULE(Block);

torch::nn::ModuleList make_model() {
  torch::manual_seed(0);
  torch::nn::ModuleList model;
  for (int i = 0; i < kBlocks; ++i) {
    model->push_back(Block());
  }
  return model;
}

/// Each block a unit; rows of the matrices divide by the ranks.
void shard(torch::nn::ModuleList& model) {
  const auto options =
      tessera::FullyShardOptions().layout(tessera::ShardLayout::Dim0);
  for (const auto& block : *model) {
    tessera::fully_shard(block, options);
  }
  tessera::fully_shard(model, options);
}

void set_gradients(const std::vector<torch::Tensor>& params) {
  for (const torch::Tensor& param : params) {
    param.mutable_grad() = torch::randn(param.sizes()) * 1e-3;
  }
}

/// Every rank has whole parameters and makes the whole step.
class GatherAll {
 public:
  explicit GatherAll(const tessera::Group& world)
      : world_(world), muon_(model_->parameters()) {}

  void step(const std::vector<torch::Tensor>& shards) {
    const auto wholes = model_->parameters();
    for (size_t i = 0; i < wholes.size(); ++i) {
      const auto whole = torch::empty(wholes[i].sizes(), torch::kBFloat16);
      world_.all_gather_into(whole, shards[i].grad().to(torch::kBFloat16));
      wholes[i].mutable_grad() = whole.to(torch::kFloat);
    }
    muon_.step();
  }

 private:
  const tessera::Group world_;
  torch::nn::ModuleList model_ = make_model();
  tessera::optim::Muon muon_;
};

} // namespace

int main(int argc, char** argv) {
  const bench::Arguments arguments(argc, argv);
  const auto world = tessera::init();
  auto model = make_model();
  shard(model);
  const auto shards = tessera::parameters(model);
  set_gradients(shards);
  tessera::optim::Muon muon(shards);
  tessera::optim::AdamW adamw(shards);
  GatherAll gather_all(world);
  auto plain = make_model();
  set_gradients(plain->parameters());
  tessera::optim::Muon alone(plain->parameters());

  bench::Row row{
      "muon/step/gpt-256x" + std::to_string(kBlocks) + "/cpu" +
          std::to_string(world.size()),
      "ms",
      {}};
  for (int repeat = 0; repeat <= arguments.times(kRepeats); ++repeat) {
    const double ours = bench::milliseconds(world, [&] { muon.step(); });
    const double gathered =
        bench::milliseconds(world, [&] { gather_all.step(shards); });
    const double adam = bench::milliseconds(world, [&] { adamw.step(); });
    const double whole = bench::milliseconds(world, [&] { alone.step(); });
    if (repeat > 0) { // the first warms up
      row.ours.push_back(ours);
      row.peers["gather_all"].push_back(gathered);
      row.peers["adamw"].push_back(adam);
      row.limit.push_back(whole / world.size());
    }
  }
  if (world.rank() == 0) {
    bench::print(row);
  }
  return 0;
}
