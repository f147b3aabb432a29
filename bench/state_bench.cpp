// Optimizer state of a sharded model: gathered on rank 0, taken as it is
// sharded, and scattered from rank 0; and the memory that each takes.
//
//   tessera run -n 2 --cpu-threads 1 state_bench
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "gpt.h"
#include "harness.h"

namespace {

constexpr int kRepeats = 3; // per round

struct Call {
  std::string name;
  std::function<double()> run; // milliseconds
  std::function<double()> limit = nullptr; // may be empty
  double peak = 0; // megabytes
  bench::Samples times = {};
  bench::Samples limits = {};
};

/// Milliseconds on the slowest rank. What `body` returns is dropped afterwards.
template <class Body>
double measure(const tessera::Group& world, const Body& body) {
  decltype(body()) result;
  return bench::milliseconds(world, [&] { result = body(); });
}

} // namespace

int main(int argc, char** argv) {
  const bench::Arguments arguments(argc, argv);
  const auto world = tessera::init();
  torch::manual_seed(0);
  const bench::GptConfig config{
      .vocabulary = 2560, .width = 384, .heads = 6, .layers = 10};
  bench::Gpt gpt(config);
  tessera::FSDP model(
      gpt,
      tessera::FSDPOptions().auto_wrap_policy(
          tessera::module_wrap_policy<bench::BlockImpl>()));
  tessera::optim::Adam optim(tessera::parameters(model), 1e-4);
  const auto ids =
      torch::randint(config.vocabulary, {config.batch, config.length});
  for (int step = 0; step < 2; ++step) {
    model(ids).square().mean().backward();
    optim.step();
    optim.zero_grad();
  }
  const auto full = tessera::full_optim_state_dict(model, optim);
  const std::optional<tessera::StateDict> to_scatter =
      world.rank() == 0 ? std::optional(full) : std::nullopt;

  // The least that gathering must do: fill that much new memory on rank 0.
  const auto copy_everything = [&] {
    return measure(world, [&] {
      std::vector<torch::Tensor> copies;
      if (world.rank() == 0) {
        for (const auto& [name, entry] : full.at("state").dict()) {
          for (const auto& [key, value] : entry.dict()) {
            copies.push_back(value.tensor().clone());
          }
        }
      }
      return copies;
    });
  };
  std::vector<Call> calls{
      {"full",
       [&] {
         return measure(world, [&] {
           return tessera::full_optim_state_dict(model, optim);
         });
       },
       copy_everything},
      {"sharded",
       [&] {
         return measure(world, [&] {
           return tessera::sharded_optim_state_dict(model, optim);
         });
       }},
      {"scatter", [&] {
         return measure(world, [&] {
           return tessera::scatter_full_optim_state_dict(
               to_scatter,
               *model,
               tessera::LoadOptimStateOptions().optim(optim));
         });
       }}};
  for (Call& call : calls) { // warms up, too
    call.peak = bench::extra_megabytes([&] { call.run(); });
  }
  for (int repeat = 0; repeat < arguments.times(kRepeats); ++repeat) {
    for (Call& call : calls) {
      call.times.push_back(call.run());
      if (call.limit) {
        call.limits.push_back(call.limit());
      }
    }
  }
  if (world.rank() == 0) {
    const std::string place = "/20M/cpu" + std::to_string(world.size());
    for (const Call& call : calls) {
      bench::print(
          {"state/" + call.name + place, "ms", call.times, call.limits});
      bench::print(
          {"state/peak-memory/" + call.name + place, "MB", {call.peak}});
    }
  }
  return 0;
}
