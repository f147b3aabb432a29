// A GPT by its shape: that of examples/gpt and bench/gpt.h.
#pragma once

#include <cstdint>
#include <optional>

#include "checkpoint/format/dtype.h"
#include "plan/model.h"
#include "plan/program.h"
#include "plan/setup.h"

namespace tessera::plan {

constexpr int64_t kMostLayers = 10000;

struct GptShape {
  int64_t layers = 12;
  int64_t width = 768;
  int64_t heads = 12;
  int64_t vocabulary = 50257;
  int64_t length = 1024; // of a sequence
  bool is_tied = true; // the embedding is the output layer too
};

/// Sequences that a rank computes with at a time, and how.
struct GptRun {
  int64_t batch = 1;
  bool recomputes = false; // each block under recompute()
  /// Of logits in the loss; default: as they come.
  std::optional<format::DType> loss_dtype = std::nullopt;
};

/// Throws PlanError for what is no GPT, or none that could be planned.
void check(const GptShape& shape);

/// Each block is a unit, the rest the root.
Model model_of(const GptShape& shape);

/// [Note: activations of a GPT]
///
/// What LibTorch's operators save for backward, N = batch * length, W = width,
/// in the compute dtype unless said:
///
///   block  input of norm1 and of norm2     2 NW
///          outputs of both                 2 NW, inputs of linears
///          queries, keys and values        3 NW
///          what attention gives              NW
///          input and output of gelu        8 NW
///          log-sum-exp of attention        batch * heads * length floats
///          mean and deviation of norms     4 N
///   head   input and output of the norm    2 NW
///          log-softmax                     N * vocabulary, in the loss's dtype
///
/// With recompute a block keeps its input alone, NW (and where random numbers
/// stand), and forward and backward have the rest of one block at a time. The
/// walk below adds what comes and goes: outputs that nobody saves, gradients of
/// activations, logits beside their log-softmax, and three tensors like the
/// logits at once in its backward.
class GptProgram : public Program {
 public:
  /// `compute`: dtype of activations.
  GptProgram(
      const GptShape& shape,
      const GptRun& run,
      format::DType compute,
      Device device);
  void forward(Rank& rank, Ledger& ledger) const override;
  void backward(Rank& rank, Ledger& ledger) const override;

 private:
  void block_forward(Rank& rank, Ledger& ledger, size_t unit) const;
  void block_backward(Rank& rank, Ledger& ledger, size_t unit) const;
  void recomputed_forward(Rank& rank, Ledger& ledger, size_t unit) const;
  void recomputed_backward(Rank& rank, Ledger& ledger, size_t unit) const;
  size_t root() const;

  const GptShape shape_;
  const bool recomputes_;
  // Bytes.
  int64_t tokens_ = 0; // ids, or targets
  int64_t states_ = 0; // (batch, length, width)
  int64_t stats_ = 0; // of a norm: mean and deviation
  int64_t log_sum_exp_ = 0;
  int64_t random_state_ = 0; // that recompute() keeps
  int64_t positions_ = 0; // (length, width)
  int64_t position_ids_ = 0;
  int64_t logits_ = 0;
  int64_t loss_logits_ = 0; // in the loss's dtype
  bool casts_logits_ = false;
};

} // namespace tessera::plan
