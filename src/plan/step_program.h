// What a training step computes: which units it reads and which activations it
// keeps.
#pragma once

#include <cstdint>
#include <optional>

#include "plan/rank.h"

namespace tessera::plan {

/// Forward and backward of a model. Books activations on the device of
/// `account`, which is the rank's, and what is computed on its clock.
class Program {
 public:
  virtual ~Program() = default;
  virtual void forward(Rank& rank, Account& account) const = 0;
  virtual void backward(Rank& rank, Account& account) const = 0;
};

/// For a model of which only the parameters are known: reads each unit once in
/// forward and once in backward, and spreads activations evenly over the units.
/// Each parameter is multiplied once for each token.
class UnitsProgram : public Program {
 public:
  UnitsProgram(const Model& model, int64_t activation_bytes, int64_t tokens)
      : model_(model), activation_bytes_(activation_bytes), tokens_(tokens) {}
  void forward(Rank& rank, Account& account) const override;
  void backward(Rank& rank, Account& account) const override;

 private:
  int64_t share_of(size_t unit) const;
  double forward_flops(size_t unit) const;
  void add_gradients(Rank& rank, size_t unit) const;

  const Model& model_;
  const int64_t activation_bytes_;
  const int64_t tokens_;
};

} // namespace tessera::plan
