// An exported GPT beside the same GPT written in C++, and what a node costs.
//
//   python3 bench/peers/exported.py --export FOLDER     # writes the models
//   exported_bench FOLDER                               # alone
//   tessera run -n 2 exported_bench FOLDER              # both sharded
//   exported_bench FOLDER 124M cuda                     # on a GPU, in bfloat16
//
// Steps of the two take turns, a handful at a time; the C++ model is the limit.
// On a GPU both compute in bfloat16 from float32 shards.
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>

#include "gpt.h"
#include "harness.h"
#include "setting.h"

namespace {

constexpr int kRepeats = 5; // per round
constexpr int kStepsARepeat = 8;
constexpr int kWarmUp = 4;
constexpr int kNodes = 1000; // of the chain

torch::Tensor loss_of(const torch::Tensor& logits, const torch::Tensor& ids) {
  return torch::cross_entropy_loss(
      logits.view({-1, logits.size(-1)}).to(torch::kFloat), ids.view({-1}));
}

/// A model with its optimizer.
template <class Model>
class Trainer {
 public:
  Trainer(
      Model model,
      const tessera::WrapPolicy& policy,
      const torch::Device& device)
      : model_(std::move(model)), device_(device) {
    model_->to(device_);
    auto options = tessera::FullyShardOptions().policy(policy);
    if (device_.is_cuda()) {
      options.mp_policy(tessera::MixedPrecisionPolicy()
                            .param_dtype(torch::kBFloat16)
                            .reduce_dtype(torch::kFloat));
    }
    tessera::fully_shard(model_, options);
    optimizer_ = std::make_unique<tessera::optim::AdamW>(
        tessera::parameters(model_), 1e-4);
  }

  void step(const torch::Tensor& ids) {
    loss_of(model_->forward(ids), ids).backward();
    optimizer_->step();
    optimizer_->zero_grad();
  }

  /// Milliseconds per step on the slowest rank.
  double measure(
      const tessera::Group& world,
      const torch::Tensor& ids,
      int steps) {
    bench::synchronize(device_);
    const double all = bench::milliseconds(world, [&] {
      for (int i = 0; i < steps; ++i) {
        step(ids);
      }
      bench::synchronize(device_);
    });
    return all / steps;
  }

 private:
  Model model_;
  const torch::Device device_;
  std::unique_ptr<tessera::optim::AdamW> optimizer_;
};

void compare_steps(
    const bench::Arguments& arguments,
    const tessera::Group& world,
    const std::string& folder,
    const bench::Setting& setting) {
  torch::manual_seed(0);
  auto loaded =
      tessera::load_exported(folder + "/gpt-" + setting.name + ".pt2");
  const auto policy = tessera::block_policy(loaded);
  Trainer<tessera::Exported> exported(loaded, policy, setting.device);
  Trainer<bench::Gpt> written(
      bench::Gpt(setting.config),
      tessera::module_wrap_policy<bench::Block>(),
      setting.device);
  const auto ids = setting.make_ids();
  for (int i = 0; i < arguments.times(kWarmUp); ++i) {
    exported.step(ids);
    written.step(ids);
  }
  bench::Row row{"exported/" + setting.place(world), "ms", {}};
  const int steps = arguments.times(kStepsARepeat);
  for (int repeat = 0; repeat < arguments.times(kRepeats); ++repeat) {
    row.ours.push_back(exported.measure(world, ids, steps));
    row.limit.push_back(written.measure(world, ids, steps));
  }
  if (world.rank() == 0) {
    bench::print(row);
  }
}

/// The chain has nodes that do next to nothing; the limit calls the same
/// operators from C++.
void compare_nodes(
    const bench::Arguments& arguments,
    const tessera::Group& world,
    const std::string& folder) {
  const torch::NoGradGuard no_grad;
  auto chain = tessera::load_exported(folder + "/chain.pt2");
  const auto input = torch::randn({1});
  const int runs = arguments.times(50);
  const auto nanoseconds = [&](const std::function<void()>& body) {
    return bench::milliseconds([&] {
             for (int i = 0; i < runs; ++i) {
               body();
             }
           }) *
        1e6 / runs / kNodes;
  };
  bench::Row row{"exported/node/cpu1", "ns", {}};
  for (int repeat = 0; repeat <= arguments.times(kRepeats); ++repeat) {
    const double ours = nanoseconds([&] { chain->forward(input); });
    const double limit = nanoseconds([&] {
      auto x = input;
      for (int i = 0; i < kNodes; ++i) {
        x = x.neg();
      }
    });
    if (repeat > 0) { // the first warms up
      row.ours.push_back(ours);
      row.limit.push_back(limit);
    }
  }
  if (world.rank() == 0) {
    bench::print(row);
  }
}

} // namespace

int main(int argc, char** argv) {
  const bench::Arguments arguments(argc, argv);
  const std::string folder = arguments.word(0, "build/bench/exported");
  const bench::Setting setting(
      arguments.word(1, "tiny"), arguments.word(2, "cpu"));
  const auto world = tessera::init();
  compare_steps(arguments, world, folder, setting);
  if (world.size() == 1 && !setting.is_cuda()) {
    compare_nodes(arguments, world, folder);
  }
  return 0;
}
