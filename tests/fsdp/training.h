// A small model, its data and its training, for tests of front ends.
#pragma once

#include <tessera/fsdp/fsdp.h>
#include <tessera/fsdp/fully_shard.h>

#include <torch/torch.h>

#include <vector>

#include "fsdp/models.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera::testing {

inline constexpr int64_t kVocabulary = 11;
inline constexpr int64_t kWidth = 6;
inline constexpr int64_t kDepth = 3;
inline constexpr int64_t kBatch = 2; // per rank
inline constexpr int kSteps = 4;

/// In double, always with the same values.
Stack make_stack(bool tied = false);

/// Tokens of one rank and step, or of all ranks one after another.
at::Tensor tokens(int rank, int step);
at::Tensor all_tokens(int size, int step);

at::Tensor loss_of(Stack& model, const at::Tensor& x);

/// Each block a unit, then the rest.
void shard_blocks(Stack& model, const FullyShardOptions& options = {});

/// The same by the handle: each block a unit, then the rest.
FSDPOptions by_block();

torch::optim::AdamW make_adamw(std::vector<at::Tensor> parameters);

/// The model after kSteps on the whole batch in one process.
struct Reference {
  Stack model{nullptr};
  std::vector<double> losses;
};
Reference train_plain(int size, bool tied = false);

/// Trains a sharded model for kSteps on this rank's part of the batch; returns
/// this rank's losses.
std::vector<double> train_sharded(Stack& model, int rank);

/// Reads parameters by operators, so that units are gathered.
void expect_same_parameters(Stack& sharded, Stack& plain, double tolerance);

} // namespace tessera::testing
