// Micro-batches of different sizes, and the same rows as one large batch.
#pragma once

#include <tessera/optim/sgd.h>
#include <tessera/train/gradient_accumulation.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "fsdp/training.h"
#include "support/device.h"

namespace tessera::testing {

inline constexpr double kTolerance = 1e-12;
inline constexpr int kMicro = 3; // micro-batches of a step

/// How many rows the micro-batches have.
enum class Rows {
  Equal,
  Uneven, // between micro-batches, steps and ranks
  Absent, // and some ranks have none
};

inline std::string name_of(Rows rows) {
  switch (rows) {
    case Rows::Equal:
      return "Equal";
    case Rows::Uneven:
      return "Uneven";
    case Rows::Absent:
      return "Absent";
  }
  return "?";
}

inline std::ostream& operator<<(std::ostream& out, Rows rows) {
  return out << name_of(rows);
}

inline int64_t rows_of(Rows rows, int rank, int step, int micro) {
  switch (rows) {
    case Rows::Equal:
      return 2;
    case Rows::Uneven:
      return 1 + (2 * rank + micro + step) % 4;
    case Rows::Absent:
      return micro == kMicro - 1 && rank > 0 ? 0 : 1 + (rank + micro) % 3;
  }
  return 0;
}

inline at::Tensor batch_of(int64_t rows, int rank, int step, int micro) {
  torch::manual_seed(10000 + 1000 * rank + 10 * step + micro);
  return torch::randint(0, kVocabulary, {rows, 5}, torch::kLong)
      .to(test_device());
}

/// Passes `count` micro-batches of a step to the accumulation.
inline bool feed(
    GradientAccumulation& accumulation,
    Stack& model,
    Rows rows,
    int rank,
    int step,
    int count) {
  bool stepped = false;
  for (int micro = 0; micro < count; ++micro) {
    EXPECT_FALSE(stepped);
    EXPECT_EQ(accumulation.num_pending(), micro);
    EXPECT_EQ(accumulation.will_step(), micro == kMicro - 1);
    const int64_t samples = rows_of(rows, rank, step, micro);
    // A sharded model needs all ranks.
    const auto batch =
        batch_of(std::max<int64_t>(samples, 1), rank, step, micro);
    const auto loss = loss_of(model, batch);
    stepped = rows == Rows::Equal ? accumulation.backward(loss)
                                  : accumulation.backward(loss, samples);
  }
  return stepped;
}

/// One process, one batch with the rows of all ranks and micro-batches.
class LargeBatches {
 public:
  explicit LargeBatches(int size, std::optional<double> max_norm)
      : size_(size), max_norm_(max_norm) {}

  void step(Rows rows, int step, int count) {
    std::vector<at::Tensor> parts;
    for (int rank = 0; rank < size_; ++rank) {
      for (int micro = 0; micro < count; ++micro) {
        const int64_t samples = rows_of(rows, rank, step, micro);
        if (samples > 0) {
          parts.push_back(batch_of(samples, rank, step, micro));
        }
      }
    }
    optimizer_.zero_grad();
    loss_of(model, torch::cat(parts)).backward();
    if (max_norm_) {
      norm = torch::nn::utils::clip_grad_norm_(model->parameters(), *max_norm_);
    }
    optimizer_.step();
  }

  Stack model = make_stack();
  double norm = 0;

 private:
  const int size_;
  const std::optional<double> max_norm_;
  optim::SGD optimizer_{model->parameters(), 0.1};
};

} // namespace tessera::testing
