// A GPT by its shape: the model of examples/gpt and bench/gpt.h.
#pragma once

#include <cstdint>
#include <optional>

#include "checkpoint/format/dtype.h"
#include "plan/model.h"
#include "plan/setup.h"
#include "plan/step_program.h"

namespace tessera::plan {

constexpr int64_t kMostLayers = 10000;
/// Of width, heads, vocabulary, length and batch.
constexpr int64_t kMostOfASize = int64_t{1} << 40;

struct GptShape {
  int64_t layers = 12;
  int64_t width = 768;
  int64_t heads = 12;
  int64_t vocabulary = 50257;
  int64_t length = 1024; // of a sequence
  bool is_tied = true; // the embedding is also the output layer
  /// The embedding and the output layer are units of their own, not parts of
  /// the root. Not if they are tied.
  bool splits_root = false;
};

/// How many sequences per rank are computed at a time, and how.
struct GptRun {
  int64_t batch = 1;
  bool recomputes = false; // each block under recompute()
  /// The dtype of logits in the loss; default: the compute dtype.
  std::optional<format::DType> loss_dtype = std::nullopt;
  /// The head and the loss by linear_cross_entropy(), whose dtypes are its own.
  bool chunks_loss = false;
};

/// Throws PlanError for a shape that is not a GPT's, or too large to plan.
void check(const GptShape& shape);

/// Each block is a unit, with splits_root the embedding and the output layer
/// too; the rest is the root.
Model model_of(const GptShape& shape);

/// [Note: activations of a GPT]
///
/// What LibTorch's operators save for backward, N = batch * length, W = width,
/// in the compute dtype unless said:
///
///   block  input of norm1 and of norm2     2 NW
///          outputs of both                 2 NW, inputs of linears
///          queries, keys and values        3 NW
///          output of attention               NW
///          input and output of gelu        8 NW
///          log-sum-exp of attention        batch * heads * length floats
///          mean and deviation of norms     4 N
///   head   input and output of the norm    2 NW
///          log-softmax                     N * vocabulary, in the loss's dtype
///
/// With recompute a block keeps only its input, NW (and the state of the random
/// number generator); forward and backward hold the rest of one block at a
/// time. The walk below adds what is allocated and freed on the way: outputs
/// that nobody saves, gradients of activations, logits beside their
/// log-softmax, and three tensors of the size of the logits at once in its
/// backward.
///
/// A loss in chunks makes all that backward needs in forward. The head then
/// leaves, in place of what is above,
///
///   head   input of the norm               NW
///          gradient of its output          NW
///          gradient of the head's weight   vocabulary * W, in float32
///
/// and holds on the way the logits of a chunk, twice on a CPU.
class GptProgram : public Program {
 public:
  /// `compute`: the dtype of activations.
  GptProgram(
      const GptShape& shape,
      const GptRun& run,
      format::DType compute,
      Device device);
  void forward(Rank& rank, Account& account) const override;
  void backward(Rank& rank, Account& account) const override;

 private:
  void head_forward(Rank& rank, Account& account) const;
  void head_backward(Rank& rank, Account& account) const;
  void chunked_forward(Rank& rank, Account& account) const;
  void chunked_backward(Rank& rank, Account& account) const;
  void block_forward(Rank& rank, Account& account, size_t unit) const;
  void block_backward(Rank& rank, Account& account, size_t unit) const;
  void recomputed_forward(Rank& rank, Account& account, size_t unit) const;
  void recomputed_backward(Rank& rank, Account& account, size_t unit) const;
  size_t num_layers() const;
  size_t first_block() const;
  size_t root() const;
  /// A parameter that is in no block, in the unit that has it.
  struct Place {
    size_t unit;
    size_t param;
  };
  /// Here a parameter is its position in a root that is not split.
  Place place_of(size_t param) const;
  size_t head() const;
  void touch(Rank& rank, size_t param) const;
  void add_gradient(Rank& rank, size_t param) const;
  void finish_split(Rank& rank, size_t param) const;

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
  /// What a loss that takes its logits in chunks holds, in bytes.
  struct ChunkedLoss {
    bool is_wanted = false;
    int64_t held = 0; // while forward computes it
    int64_t hidden_gradient = 0;
    int64_t weight_gradient = 0;
    bool casts_weight_gradient = false; // to the compute dtype
  };
  ChunkedLoss chunked_;
  // Operations of forward; backward has twice as many.
  double square_flops_ = 0; // a product with a matrix of (width, width)
  double attention_flops_ = 0; // both products, as if nothing was masked
  double head_flops_ = 0;
};

} // namespace tessera::plan
