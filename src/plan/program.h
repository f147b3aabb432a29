// What a training step computes: which units it reads and which activations it
// keeps.
#pragma once

#include <cstdint>
#include <optional>

#include "plan/rank.h"

namespace tessera::plan {

/// Forward and backward of a model. Books activations in `ledger`, that of the
/// rank's device.
class Program {
 public:
  virtual ~Program() = default;
  virtual void forward(Rank& rank, Ledger& ledger) const = 0;
  virtual void backward(Rank& rank, Ledger& ledger) const = 0;
};

/// For a model of which only the parameters are known: reads each unit once in
/// forward and once in backward, and spreads activations evenly over the units.
class UnitsProgram : public Program {
 public:
  UnitsProgram(const Model& model, int64_t activation_bytes)
      : model_(model), activation_bytes_(activation_bytes) {}
  void forward(Rank& rank, Ledger& ledger) const override;
  void backward(Rank& rank, Ledger& ledger) const override;

 private:
  int64_t share_of(size_t unit) const;
  void add_gradients(Rank& rank, size_t unit) const;

  const Model& model_;
  const int64_t activation_bytes_;
};

} // namespace tessera::plan
