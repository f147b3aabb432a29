#include <tessera/recompute/recompute.h>

#include <ATen/core/grad_mode.h>

#include <utility>

#include "recompute/recompute_node.h"
#include "recompute/surroundings.h"

namespace tessera {
namespace {

/// How many runs of the thread are second ones, each inside the one before.
thread_local int second_runs = 0;

struct SecondRun {
  SecondRun() {
    ++second_runs;
  }
  ~SecondRun() {
    --second_runs;
  }
  SecondRun(const SecondRun&) = delete;
  SecondRun& operator=(const SecondRun&) = delete;
};

} // namespace

bool is_recomputing() {
  return second_runs > 0;
}

std::vector<at::Tensor> detail::recompute(
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> fn,
    const std::vector<at::Tensor>& inputs,
    const RecomputeOptions& options) {
  if (!at::GradMode::is_enabled()) {
    return fn(inputs);
  }
  const auto run = [fn =
                        std::move(fn)](const std::vector<at::Tensor>& tensors) {
    const recomputation::OwnCasts own_casts;
    return fn(tensors);
  };
  auto devices = options.preserve_rng_state()
      ? recomputation::random_devices(inputs)
      : std::vector<at::Device>();
  const recomputation::RecordedDraws draws(devices);
  const auto then = recomputation::Surroundings::current(devices);
  const auto again = [run, then](const std::vector<at::Tensor>& tensors) {
    const recomputation::SurroundingsGuard guard(then);
    const SecondRun second_run;
    return run(tensors);
  };
  const auto first = [&](const std::vector<at::Tensor>& tensors) {
    auto outputs = run(tensors);
    draws.check();
    return outputs;
  };
  return recomputation::run_without_graph(first, again, inputs);
}

} // namespace tessera
