// How much of the wire a sharded step hides behind its own computation, on one
// rank of a world whose other ranks are not there: the backend "fake" takes the
// time of a network.
//
//   overlap_bench 64 1.2     # 64 ranks; computing takes 1.2 times the wire
//   overlap_bench 64 2 4     # a step of 4 backwards and one reduction
//
// The limit is the wire, or computing with the first gather and the last
// reduction, which nothing can hide, whichever is longer. The peer `plan` is
// what `tessera plan` predicts from the time of computing and the same wire.
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "gpt.h"
#include "harness.h"
#include "plan/plan.h"
#include "setting.h"

namespace {

constexpr int kRepeats = 9;
constexpr double kLatency = 20e-6;

/// Blocks are most of it, as in a large model.
constexpr bench::GptConfig kConfig{
    .vocabulary = 2048,
    .width = 256,
    .heads = 4,
    .layers = 12,
    .length = 64,
    .batch = 4};

constexpr tessera::plan::GptShape kShape{
    .layers = kConfig.layers,
    .width = kConfig.width,
    .heads = kConfig.heads,
    .vocabulary = kConfig.vocabulary,
    .length = kConfig.length,
    .is_tied = false};

tessera::plan::Plan plan_of(
    int ranks,
    int backwards,
    const tessera::plan::Speeds& speeds) {
  return make_plan(
      tessera::plan::GptSubject{kShape, {.batch = kConfig.batch}},
      {.shards = ranks,
       .accumulate = backwards,
       .syncs_always = backwards == 1,
       .device = tessera::plan::Device::Cpu,
       .speeds = speeds});
}

/// A sharded model in a world of its own.
class Trainer {
 public:
  Trainer(int ranks, int backwards, double bandwidth) : backwards_(backwards) {
    tessera::shutdown(); // of the trainer before, which keeps its group
    tessera::init(tessera::InitOptions()
                      .backend("fake")
                      .rank(0)
                      .world_size(ranks)
                      .local_rank(0)
                      .fake_bandwidth(bandwidth)
                      .fake_latency(bandwidth > 0 ? kLatency : 0));
    tessera::seed(0);
    model_ = bench::Gpt(kConfig);
    for (const auto& block : *model_->blocks) {
      tessera::fully_shard(block);
    }
    tessera::fully_shard(model_);
  }

  /// Forwards and backwards; the last backward reduces.
  void step(const torch::Tensor& ids) {
    for (int i = 0; i < backwards_; ++i) {
      tessera::set_requires_gradient_sync(model_, i + 1 == backwards_);
      bench::loss_of(model_, ids).backward();
    }
    for (const torch::Tensor& param : tessera::parameters(model_)) {
      param.mutable_grad().reset();
    }
  }

 private:
  const int backwards_;
  bench::Gpt model_ = nullptr;
};

} // namespace

int main(int argc, char** argv) {
  const bench::Arguments arguments(argc, argv);
  const int ranks = std::stoi(arguments.word(0, "64"));
  const std::string times = arguments.word(1, "1.2");
  const int backwards = std::stoi(arguments.word(2, "1"));
  at::set_num_threads(1);
  const auto ids = torch::randint(
      0, kConfig.vocabulary, {kConfig.batch, kConfig.length}, torch::kLong);

  Trainer at_once(ranks, backwards, /*bandwidth=*/0);
  bench::Samples warm_up;
  for (int i = 0; i < 1 + arguments.times(4); ++i) { // gathers ahead
    warm_up.push_back(bench::milliseconds([&] { at_once.step(ids); }));
  }
  const auto traffic = plan_of(ranks, backwards, {}).wire.total();
  const double wire_seconds = bench::median(warm_up) / 1e3 / std::stod(times) -
      kLatency * static_cast<double>(traffic.collectives);
  if (wire_seconds <= 0) {
    throw std::runtime_error("computing takes less than the latencies alone");
  }
  const tessera::comm::WireSpeed wire{
      .bytes_per_second =
          static_cast<double>(traffic.sent_bytes) / wire_seconds,
      .latency_seconds = kLatency};

  Trainer on_a_wire(ranks, backwards, wire.bytes_per_second);
  on_a_wire.step(ids);
  on_a_wire.step(ids);
  bench::Row row{
      "overlap/w" + std::to_string(ranks) + "/compute" + times + "x" +
          (backwards > 1 ? "/accumulate" + std::to_string(backwards) : ""),
      "ms",
      {}};
  bench::Samples computing;
  for (int i = 0; i < arguments.times(kRepeats); ++i) {
    computing.push_back(bench::milliseconds([&] { at_once.step(ids); }));
    row.ours.push_back(bench::milliseconds([&] { on_a_wire.step(ids); }));
  }

  // The plan computes as long as the step did that sends at once.
  const double seconds = bench::median(computing) / 1e3;
  const double flops =
      plan_of(ranks, backwards, {.flops = 1}).time.computing / seconds;
  const auto plan = plan_of(ranks, backwards, {.flops = flops, .wire = wire});
  const double ends = 2 *
      wire.seconds(tessera::comm::sent_of(4 * plan.units.back().numel, ranks));
  row.limit.push_back(std::max(seconds + ends, plan.time.sending) * 1e3);
  row.peers["plan"].push_back(plan.time.together() * 1e3);
  bench::print(row);
  return 0;
}
