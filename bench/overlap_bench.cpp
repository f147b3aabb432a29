// How much of the wire a sharded step hides behind its own computation, on one
// rank of a world whose other ranks are not there: the backend "fake" takes the
// time of a network.
//
//   overlap_bench 64 1.2        64 ranks; computing takes 1.2 times the wire
//   overlap_bench 8x8 1.2       hybrid sharding: 8 copies, each of 8 ranks
//   overlap_bench 64 2 4        a step of 4 backwards and one reduction
//   overlap_bench 8 400GB 1 124M cuda
//                               on a GPU, whose wire sends 400 GB/s
//
// The embedding and the output layer are units of their own, so that the output
// layer travels beside the blocks. On a GPU the model computes in bfloat16 from
// float32 shards and reduces in float32; the wire is a stream of its own that
// sleeps. In hybrid sharding there are two wires of the same speed.
// The limit is the wire, or computing with the first gather and the last
// reduction, those of the embedding, which nothing can hide, whichever is
// longer. The peer `plan` is what `tessera plan` predicts from the time of
// computing and the same wire. Rows `overlap/exposed/` have what is beyond
// computing. On a GPU rows `overlap/wire/` have the time of one collective
// beside matrix products; the limit is what it is told to take.
#include <tessera/tessera.h>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "gpt.h"
#include "harness.h"
#include "plan/plan.h"
#include "setting.h"

namespace {

constexpr int kRepeats = 9;
constexpr double kLatency = 20e-6;

/// What is trained, and over how many ranks.
struct Task {
  explicit Task(const bench::Arguments& arguments)
      : mesh(arguments.word(0, "64")),
        copies(mesh.find('x') == std::string::npos ? 1 : std::stoi(mesh)),
        shards(std::stoi(mesh.substr(mesh.find('x') + 1))),
        speed(arguments.word(1, "1.2")),
        backwards(std::stoi(arguments.word(2, "1"))),
        size(arguments.word(3, "tiny")),
        device(arguments.word(4, "cpu")) {
    if (device.is_cuda()) {
      const bench::Setting setting(size, device);
      config = setting.config;
    }
  }

  tessera::plan::Plan plan(const tessera::plan::Speeds& speeds) const {
    const tessera::plan::GptShape shape{
        .layers = config.layers,
        .width = config.width,
        .heads = config.heads,
        .vocabulary = config.vocabulary,
        .length = config.length,
        .is_tied = false,
        .splits_root = true};
    tessera::plan::TrainingSetup setup{
        .copies = copies,
        .shards = shards,
        .accumulate = backwards,
        .syncs_always = backwards == 1,
        .device = tessera::plan::Device::Cpu,
        .speeds = speeds};
    if (device.is_cuda()) {
      setup.param_dtype = tessera::format::DType::BFloat16;
      setup.device = tessera::plan::Device::Cuda;
    }
    return make_plan(
        tessera::plan::GptSubject{
            shape, {.batch = config.batch, .chunks_loss = true}},
        setup);
  }

  /// The wire's speed, if it is given and not by the time of computing.
  std::optional<double> bandwidth() const {
    constexpr std::string_view kUnit = "GB";
    return speed.ends_with(kUnit) ? std::optional(std::stod(speed) * 1e9)
                                  : std::nullopt;
  }

  /// Of a row.
  std::string name(const std::string& family) const {
    return family + "/" + (device.is_cuda() ? "gpt-" + size + "/" : "") + "w" +
        mesh + "/" + (bandwidth() ? speed : "compute" + speed + "x") +
        (backwards > 1 ? "/accumulate" + std::to_string(backwards) : "") +
        (device.is_cuda() ? "/cuda1" : "");
  }

  const std::string mesh; // "64", or copies and shards: "8x8"
  const int copies;
  const int shards;
  const std::string speed;
  const int backwards;
  const std::string size;
  const torch::Device device;
  /// Blocks are most of it, as in a large model.
  bench::GptConfig config{
      .vocabulary = 2048,
      .width = 256,
      .heads = 4,
      .layers = 12,
      .length = 64,
      .batch = 4};
};

/// A sharded model in a world of its own.
class Trainer {
 public:
  Trainer(const Task& task, double bandwidth)
      : backwards_(task.backwards), device_(task.device) {
    tessera::shutdown(); // of the trainer before, which keeps its group
    tessera::init(tessera::InitOptions()
                      .backend("fake")
                      .rank(0)
                      .world_size(task.copies * task.shards)
                      .local_rank(0)
                      .fake_bandwidth(bandwidth)
                      .fake_latency(latency_of(task, bandwidth)));
    tessera::seed(0);
    model_ = bench::Gpt(task.config);
    model_->to(device_);
    tessera::FullyShardOptions options;
    if (device_.is_cuda()) {
      options.mp_policy(tessera::MixedPrecisionPolicy()
                            .param_dtype(torch::kBFloat16)
                            .reduce_dtype(torch::kFloat));
    }
    if (task.copies > 1) {
      options.mesh(tessera::make_mesh({task.copies, task.shards}));
    }
    tessera::fully_shard(model_->tokens, options);
    for (const auto& block : *model_->blocks) {
      tessera::fully_shard(block, options);
    }
    tessera::fully_shard(model_->head, options);
    tessera::fully_shard(model_, options);
  }

  /// What a gather copies goes beside computing on a GPU's wire: so it does on
  /// one that takes no time.
  static double latency_of(const Task& task, double bandwidth) {
    constexpr double kNone = 1e-9;
    return bandwidth > 0 ? kLatency : task.device.is_cuda() ? kNone : 0;
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
  double milliseconds(const torch::Tensor& ids) {
    bench::synchronize(device_);
    return bench::milliseconds([&] {
      step(ids);
      bench::synchronize(device_);
    });
  }

 private:
  const int backwards_;
  const torch::Device device_;
  bench::Gpt model_ = nullptr;
};

/// Milliseconds that collectives take beside matrix products, and should take.
struct WireCheck {
  bench::Samples taken;
  double expected = 0;
};

/// The GPU must compute all the while, as in a step: a wire that follows its
/// clocks would be slower then.
WireCheck check_wire(const Task& task, const tessera::comm::WireSpeed& wire) {
  constexpr int kCollectives = 10;
  constexpr double kSeconds = 5e-3;
  constexpr double kTolerance = 0.05;
  const auto world = tessera::world();
  const auto numel =
      static_cast<int64_t>(kSeconds * wire.bytes_per_second / sizeof(float));
  const auto tensor = torch::zeros({numel}, task.device);
  WireCheck result;
  result.expected = 1e3 *
      wire.seconds(2 * tessera::comm::sent_of(tensor.nbytes(), world.size()));

  const auto matrix = torch::ones(
      {8192, 8192}, torch::dtype(torch::kBFloat16).device(task.device));
  auto product = torch::mm(matrix, matrix);
  const auto multiply = [&] { torch::mm_out(product, matrix, matrix); };
  bench::synchronize(task.device);
  const double one = bench::milliseconds([&] {
    multiply();
    bench::synchronize(task.device);
  });
  const auto products =
      static_cast<int>(1.5 * kCollectives * result.expected / one) + 10;
  for (int i = 0; i < products; ++i) {
    multiply();
  }
  const auto timed = c10::EventFlag::BACKEND_DEFAULT;
  c10::Event computed(torch::kCUDA);
  computed.record(
      c10::impl::VirtualGuardImpl(torch::kCUDA).getStream(task.device));
  {
    // Collectives wait for the stream of their caller.
    const c10::StreamGuard beside(c10::impl::VirtualGuardImpl(torch::kCUDA)
                                      .getStreamFromGlobalPool(task.device));
    for (int i = 0; i < kCollectives; ++i) {
      c10::Event begin(torch::kCUDA, timed);
      c10::Event end(torch::kCUDA, timed);
      begin.record(beside.current_stream());
      world.all_reduce_async(tensor).wait();
      end.record(beside.current_stream());
      end.synchronize();
      result.taken.push_back(begin.elapsedTime(end));
    }
  }
  if (computed.query()) {
    throw std::runtime_error(
        "the wire was to be timed beside matrix products, and these ended first");
  }
  bench::synchronize(task.device);
  const double ratio = bench::median(result.taken) / result.expected;
  if (std::abs(ratio - 1) > kTolerance) {
    throw std::runtime_error(
        "beside matrix products the wire takes " + std::to_string(ratio) +
        " times what it should");
  }
  return result;
}

} // namespace

int main(int argc, char** argv) {
  const bench::Arguments arguments(argc, argv);
  const Task task(arguments);
  at::set_num_threads(1);
  const auto ids = torch::randint(
                       0,
                       task.config.vocabulary,
                       {task.config.batch, task.config.length},
                       torch::kLong)
                       .to(task.device);

  Trainer at_once(task, /*bandwidth=*/0);
  at_once.step(ids); // makes what is made once
  bench::Samples warm_up;
  for (int i = 0; i < arguments.times(4); ++i) { // gathers ahead
    warm_up.push_back(at_once.milliseconds(ids));
  }
  const auto traffic = task.plan({}).wire.total();
  const auto sent_bytes = static_cast<double>(traffic.sent_bytes);
  const double latencies = kLatency * static_cast<double>(traffic.collectives);
  const double wire_seconds = task.bandwidth()
      ? sent_bytes / *task.bandwidth()
      : bench::median(warm_up) / 1e3 / std::stod(task.speed) - latencies;
  if (wire_seconds <= 0) {
    throw std::runtime_error("computing takes less than the latencies alone");
  }
  const tessera::comm::WireSpeed wire{
      .bytes_per_second = sent_bytes / wire_seconds,
      .latency_seconds = kLatency};

  Trainer on_a_wire(task, wire.bytes_per_second);
  on_a_wire.step(ids);
  on_a_wire.step(ids);
  bench::Row row{task.name("overlap"), "ms", {}};
  bench::Row exposed{task.name("overlap/exposed"), "ms", {}};
  bench::Samples computing;
  for (int i = 0; i < arguments.times(kRepeats); ++i) {
    computing.push_back(at_once.milliseconds(ids));
    row.ours.push_back(on_a_wire.milliseconds(ids));
    exposed.ours.push_back(row.ours.back() - computing.back());
  }

  if (task.device.is_cuda() && !arguments.is_quick()) {
    WireCheck check = check_wire(task, wire);
    bench::print(
        {task.name("overlap/wire"),
         "ms",
         std::move(check.taken),
         {check.expected}});
  }

  // The plan computes as long as the step did that sends at once.
  const double seconds = bench::median(computing) / 1e3;
  const double flops = task.plan({.flops = 1}).time.computing / seconds;
  const auto plan = task.plan({.flops = flops, .wire = wire});
  const int64_t gathered = task.device.is_cuda() ? 2 : 4; // bytes an element
  const int64_t embedding = plan.units.front().numel;
  const auto takes = [&](int64_t element_bytes) {
    return wire.seconds(
        tessera::comm::sent_of(element_bytes * embedding, task.shards));
  };
  const double over_copies = task.copies == 1
      ? 0
      : wire.seconds(
            2 *
            tessera::comm::sent_of(4 * embedding / task.shards, task.copies));
  const double ends = takes(gathered) + takes(4) + over_copies;
  // Two wires send at once; computing takes longer than each.
  const double busy = task.copies > 1 ? 0 : plan.time.sending;
  row.limit.push_back(std::max(seconds + ends, busy) * 1e3);
  row.peers["plan"].push_back(plan.time.together() * 1e3);
  exposed.limit.push_back(row.limit.back() - seconds * 1e3);
  exposed.peers["plan"].push_back(row.peers["plan"].back() - seconds * 1e3);
  bench::print(row);
  bench::print(exposed);
  return 0;
}
