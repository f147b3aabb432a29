// Optimizer state of a sharded model: gathered on rank 0, taken where it lies,
// and scattered from rank 0; and the memory that takes.
//
//   tessera run -n 2 --cpu-threads 1 state_bench
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "gpt.h"

namespace {

constexpr int kRepeats = 9;
constexpr double kMega = 1e6;

/// The most memory this process had, since the last call of forget_peak().
double peak_megabytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  double kilobytes = 0;
  while (status >> word) {
    if (word == "VmHWM:") {
      status >> kilobytes;
    }
  }
  return kilobytes * 1024 / kMega;
}

void forget_peak() {
  std::ofstream("/proc/self/clear_refs") << "5";
}

/// Milliseconds on the slowest rank. What `body` returns is dropped afterwards.
template <class Body>
double measure(const tessera::Group& world, const Body& body) {
  world.barrier();
  const auto start = std::chrono::steady_clock::now();
  const auto result = body();
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - start;
  auto slowest = torch::full({1}, elapsed.count(), torch::kDouble);
  world.all_reduce(slowest, tessera::ReduceOp::Max);
  return slowest.item<double>();
}

/// Megabytes that `body` took at most on this rank, its result included.
double measure_peak(const std::function<double()>& body) {
  malloc_trim(0); // so that it takes new memory
  forget_peak();
  const double before = peak_megabytes();
  body();
  return peak_megabytes() - before;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Series {
  std::string name;
  std::function<double()> run;
  std::function<double()> limit; // may be none
  std::vector<double> times = {};
  std::vector<double> limits = {};
  double peak = 0;
};

void print_row(
    const std::string& name,
    const char* unit,
    const std::vector<double>& values,
    const std::vector<double>& limits) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  std::printf(
      "{\"name\": \"%s\", \"unit\": \"%s\", \"ours\": %.3f, \"peers\": {}, "
      "%s\"repeats\": %d, \"spread\": %.2f}\n",
      name.c_str(),
      unit,
      median(values),
      limits.empty()
          ? ""
          : ("\"limit\": " + std::to_string(median(limits)) + ", ").c_str(),
      kRepeats,
      (*most - *least) / std::max(median(values), 1e-9));
}

} // namespace

int main() {
  const auto world = tessera::init();
  torch::manual_seed(0);
  const bench::GptConfig config{
      .vocabulary = 2560, .width = 384, .heads = 6, .layers = 10};
  bench::Gpt gpt(config);
  tessera::FSDP model(
      gpt,
      tessera::FSDPOptions().auto_wrap_policy(
          tessera::module_wrap_policy<bench::BlockImpl>()));
  tessera::optim::Adam optim(tessera::parameters(*model), 1e-4);
  const auto ids =
      torch::randint(config.vocabulary, {config.batch, config.length});
  for (int step = 0; step < 2; ++step) {
    model(ids).square().mean().backward();
    optim.step();
    optim.zero_grad();
  }
  const auto full = tessera::full_optim_state_dict(*model, optim);
  const std::optional<tessera::StateDict> to_scatter =
      world.rank() == 0 ? std::optional(full) : std::nullopt;

  // What gathering must at least do: fill that much new memory on rank 0.
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
  std::vector<Series> series;
  series.push_back(
      {"full",
       [&] {
         return measure(world, [&] {
           return tessera::full_optim_state_dict(*model, optim);
         });
       },
       copy_everything});
  series.push_back(
      {"sharded",
       [&] {
         return measure(world, [&] {
           return tessera::sharded_optim_state_dict(*model, optim);
         });
       },
       nullptr});
  series.push_back(
      {"scatter",
       [&] {
         return measure(world, [&] {
           return tessera::scatter_full_optim_state_dict(
               to_scatter, *model, {.optim = &optim});
         });
       },
       nullptr});
  for (Series& one : series) { // warms up, too
    one.peak = measure_peak(one.run);
  }
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    for (Series& one : series) {
      one.times.push_back(one.run());
      if (one.limit) {
        one.limits.push_back(one.limit());
      }
    }
  }
  if (world.rank() == 0) {
    const std::string place = "/20M/cpu" + std::to_string(world.size());
    for (const Series& one : series) {
      print_row("state/" + one.name + place, "ms", one.times, one.limits);
      print_row("state/peak-memory/" + one.name + place, "MB", {one.peak}, {});
    }
  }
  return 0;
}
