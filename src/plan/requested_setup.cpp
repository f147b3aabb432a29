#include "plan/requested_setup.h"

#include <charconv>
#include <cmath>

#include "checkpoint/format/format_error.h"
#include "plan/checked.h"

namespace tessera::plan {
namespace {

struct Grid {
  int64_t copies = 1;
  int64_t shards = 1;
};

/// "8x2048".
Grid parse_mesh(const std::string& text) {
  Grid grid;
  const char* end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, grid.copies);
  if (first.ec == std::errc() && first.ptr != end && *first.ptr == 'x') {
    const auto second = std::from_chars(first.ptr + 1, end, grid.shards);
    if (second.ec == std::errc() && second.ptr == end) {
      return grid;
    }
  }
  throw PlanError(
      "--mesh " + format::in_quotes(text) +
      ": expected copies and the ranks that share each, such as 8x2048.");
}

void place_ranks(
    const Request& request,
    const std::string& strategy,
    TrainingSetup& setup) {
  if (request.world && !request.mesh.empty()) {
    throw PlanError(
        "--world and --mesh both say how many ranks there are. Give one of them.");
  }
  if (strategy == "hybrid") {
    if (request.mesh.empty()) {
      throw PlanError(
          "hybrid sharding needs --mesh COPIESxSHARDS, such as 8x2048.");
    }
    const Grid grid = parse_mesh(request.mesh);
    setup.copies = grid.copies;
    setup.shards = grid.shards;
    return;
  }
  if (!request.mesh.empty()) {
    throw PlanError(
        "--mesh is for --strategy hybrid; " + strategy + " takes --world N.");
  }
  const bool is_sharded =
      strategy == "full_shard" || strategy == "shard_grad_op";
  (is_sharded ? setup.shards : setup.copies) = request.world.value_or(1);
  setup.is_whole = strategy == "no_shard";
}

Speeds speeds_of(const Request& request, int64_t world) {
  const double flops = request.tflops.value_or(1) * 1e12;
  if (!(std::isfinite(flops) && flops > 0)) {
    throw PlanError("--tflops: expected a positive number.");
  }
  if (request.bandwidth.value_or(1) < 1) {
    throw PlanError("--bandwidth: expected bytes per second, 1 or more.");
  }
  const double latency_us = request.latency_us.value_or(0);
  if (!(std::isfinite(latency_us) && latency_us >= 0)) {
    throw PlanError("--latency: expected microseconds, 0 or more.");
  }
  if (!request.tflops) {
    if (request.bandwidth || request.latency_us || request.tokens) {
      throw PlanError(
          "--bandwidth, --latency and --tokens are for the time of a step. Give --tflops too: what a rank computes per second.");
    }
    return {};
  }
  if (world > 1 && !request.bandwidth) {
    throw PlanError(
        "the time of a step on several ranks needs --bandwidth too: what a rank sends per second, such as 50GB.");
  }
  Speeds speeds{.flops = flops};
  if (request.bandwidth) {
    speeds.wire = {
        .bytes_per_second = static_cast<double>(*request.bandwidth),
        .latency_seconds = latency_us * 1e-6};
  }
  return speeds;
}

} // namespace

std::string strategy_of(const Request& request) {
  if (request.strategy == "fsdp") { // as the trainer calls it
    return "full_shard";
  }
  if (!request.strategy.empty()) {
    return request.strategy;
  }
  return request.mesh.empty() ? "full_shard" : "hybrid";
}

TrainingSetup setup_of(const Request& request) {
  const std::string strategy = strategy_of(request);
  TrainingSetup setup{
      .engine = strategy == "ddp" ? Engine::Ddp
          : strategy == "zero"    ? Engine::Zero
                                  : Engine::Sharded,
      .layout = request.layout == "dim0" ? engine::Layout::Kind::Dim0
                                         : engine::Layout::Kind::Flat,
      .dtype = request.dtype,
      .param_dtype = request.param_dtype,
      .reduce_dtype = request.reduce_dtype,
      .keep_cast_shards = request.keep_cast_shards,
      .overlap_bytes = request.overlap_bytes,
      .optimizer = request.optimizer,
      .accumulate = request.accumulate,
      .syncs_always = !request.no_sync,
      .offload = request.offload,
      .device = request.device == "cpu" ? Device::Cpu : Device::Cuda};
  if (setup.engine != Engine::Sharded &&
      (request.layout || request.reshard_after_forward)) {
    throw PlanError(
        "--layout and --reshard-after-forward belong to sharding; " + strategy +
        " does not shard parameters. Leave them out.");
  }
  if (setup.engine != Engine::Sharded && request.overlap_bytes) {
    throw PlanError(
        "--overlap-bytes is memory for gathers and reductions of shards; " +
        strategy + " does not shard parameters. Leave it out.");
  }
  place_ranks(request, strategy, setup);
  setup.speeds = speeds_of(request, setup.world());
  setup.reshard_after_forward =
      request.reshard_after_forward.value_or(strategy != "shard_grad_op");
  if (strategy == "shard_grad_op" && setup.reshard_after_forward) {
    throw PlanError(
        "shard_grad_op keeps parameters after forward, which contradicts --reshard-after-forward true. Use --strategy full_shard.");
  }
  if (request.no_sync && request.accumulate == 1) {
    throw PlanError(
        "--no-sync skips the reduction in all backwards of a step but the last, and a step has only one. Give --accumulate N.");
  }
  check(setup);
  return setup;
}

} // namespace tessera::plan
