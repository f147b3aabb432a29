// A plan as a user asks for it: the model, the set-up and the questions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/format/dtype.h"
#include "plan/checkpoint_model.h"
#include "plan/setup.h"

namespace tessera::plan {

/// The flags of `tessera plan`; a flag that was not given is empty. Errors name
/// the flags.
struct Request {
  // The model: a checkpoint, or a GPT by its shape. Batch, length, recompute
  // and loss_dtype are of an exported program too.
  std::string checkpoint;
  CheckpointOptions grouping;
  std::optional<int64_t> activation_bytes = std::nullopt;
  std::optional<int64_t> tokens = std::nullopt; // per rank per backward
  std::optional<int64_t> layers = std::nullopt;
  std::optional<int64_t> width = std::nullopt;
  std::optional<int64_t> heads = std::nullopt;
  std::optional<int64_t> vocabulary = std::nullopt;
  std::optional<int64_t> length = std::nullopt;
  std::optional<int64_t> batch = std::nullopt;
  bool tied = false;
  bool untied = false;
  bool split_root = false;
  bool recompute = false;
  bool chunked_loss = false;
  std::optional<format::DType> loss_dtype = std::nullopt;

  // The set-up.
  std::optional<int64_t> world = std::nullopt;
  std::string mesh; // "8x2048": copies, and the ranks that share each
  std::string strategy;
  std::optional<std::string> layout = std::nullopt;
  std::optional<bool> reshard_after_forward = std::nullopt;
  std::optional<format::DType> dtype = std::nullopt;
  std::optional<format::DType> param_dtype = std::nullopt;
  std::optional<format::DType> reduce_dtype = std::nullopt;
  bool keep_cast_shards = false;
  std::optional<int64_t> overlap_bytes = std::nullopt;
  Optimizer optimizer = Optimizer::AdamW;
  int64_t accumulate = 1;
  bool no_sync = false;
  bool offload = false;
  std::string device = "cpu";

  // How fast a rank is.
  std::optional<double> tflops = std::nullopt;
  std::optional<int64_t> bandwidth = std::nullopt; // bytes per second
  std::optional<double> latency_us = std::nullopt; // of a collective

  // The questions.
  std::optional<int64_t> memory_bytes = std::nullopt; // of a rank's device
  std::optional<std::string> largest = std::nullopt; // batch, layers or width
};

} // namespace tessera::plan
