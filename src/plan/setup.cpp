#include "plan/setup.h"

#include <string>

#include "plan/checked.h"

namespace tessera::plan {
namespace {

constexpr int64_t kMostBackwards = 1 << 20;

void check_ranks(const char* what, int64_t count) {
  if (count < 1 || count > kMostRanks) {
    throw PlanError(
        std::to_string(count) + " " + what + ": expected 1 to " +
        std::to_string(kMostRanks) + ".");
  }
}

} // namespace

bool is_floating(format::DType dtype) {
  switch (dtype) {
    case format::DType::BFloat16:
    case format::DType::Float16:
    case format::DType::Float32:
    case format::DType::Float64:
    case format::DType::Float8E4M3FN:
    case format::DType::Float8E4M3FNUZ:
    case format::DType::Float8E5M2:
    case format::DType::Float8E5M2FNUZ:
    case format::DType::Float8E8M0FNU:
      return true;
    default:
      return false;
  }
}

void check(const TrainingSetup& setup) {
  check_ranks("copies", setup.copies);
  check_ranks("ranks that share a copy", setup.shards);
  check_ranks("ranks", times(setup.copies, setup.shards));
  if (setup.accumulate < 1 || setup.accumulate > kMostBackwards) {
    throw PlanError(
        std::to_string(setup.accumulate) +
        " backwards per step: expected 1 to " + std::to_string(kMostBackwards) +
        ".");
  }
  for (const auto& dtype :
       {setup.dtype, setup.param_dtype, setup.reduce_dtype}) {
    if (dtype && !is_floating(*dtype)) {
      throw PlanError(
          std::string(format::info(*dtype).torch_name) +
          " has no gradients. Use float32, bfloat16, float16 or float64.");
    }
  }
  if (setup.keep_cast_shards && (!setup.param_dtype || setup.offload)) {
    throw PlanError(
        setup.offload
            ? "--keep-cast-shards takes device memory for a second copy of the shards, and --offload keeps the shards in host memory. Leave out one of them."
            : "--keep-cast-shards needs --param-dtype: without it, nothing is cast.");
  }
  if (setup.engine == Engine::Sharded) {
    return;
  }
  const auto refuse = [](const char* what) {
    throw PlanError(
        std::string(what) +
        " belongs to sharding; ddp and zero train whole copies without it. Choose --strategy full_shard, or leave it out.");
  };
  if (setup.shards != 1) {
    refuse("a mesh with shards");
  }
  if (setup.param_dtype || setup.reduce_dtype) {
    refuse("a dtype to compute or to reduce in (use --dtype for all)");
  }
  if (setup.offload) {
    refuse("offload");
  }
  if (setup.layout != engine::Layout::Kind::Flat) {
    refuse("a layout");
  }
  if (!setup.reshard_after_forward) {
    refuse("reshard_after_forward");
  }
}

const char* name_of(Optimizer optimizer) {
  switch (optimizer) {
    case Optimizer::AdamW:
      return "adamw";
    case Optimizer::Sgd:
      return "sgd";
    case Optimizer::SgdMomentum:
      return "sgd-momentum";
    case Optimizer::Adagrad:
      return "adagrad";
    case Optimizer::RmsProp:
      return "rmsprop";
    case Optimizer::None:
      return "none";
  }
  return "?";
}

int64_t states_of(Optimizer optimizer) {
  switch (optimizer) {
    case Optimizer::AdamW:
      return 2;
    case Optimizer::SgdMomentum:
    case Optimizer::Adagrad:
    case Optimizer::RmsProp:
      return 1;
    case Optimizer::Sgd:
    case Optimizer::None:
      return 0;
  }
  return 0;
}

int64_t temporaries_of(Optimizer optimizer, Device device) {
  switch (optimizer) {
    case Optimizer::RmsProp:
      return 1;
    case Optimizer::Adagrad: // fused on the CPU only
      return device == Device::Cpu ? 0 : 1;
    case Optimizer::AdamW:
    case Optimizer::Sgd:
    case Optimizer::SgdMomentum:
    case Optimizer::None:
      return 0;
  }
  return 0;
}

bool counts_steps(Optimizer optimizer) {
  switch (optimizer) {
    case Optimizer::AdamW:
    case Optimizer::Adagrad:
    case Optimizer::RmsProp:
      return true;
    case Optimizer::Sgd:
    case Optimizer::SgdMomentum:
    case Optimizer::None:
      return false;
  }
  return false;
}

} // namespace tessera::plan
