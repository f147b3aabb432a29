// A rank that walks through training steps and books memory and traffic.
#pragma once

#include <cstddef>
#include <memory>

#include "plan/clock.h"
#include "plan/ledger.h"
#include "plan/model.h"
#include "plan/setup.h"
#include "plan/traffic.h"

namespace tessera::plan {

/// What a rank holds and sends, and how long that takes. On the CPU, device and
/// host are the same memory: the host's ledger stays empty.
struct Account {
  Ledger device;
  Ledger host; // what offload moves to host memory
  Wire wire;
  Clock clock;
};

/// [Note: walking through a step]
///
/// Peaks are not a sum of maxima: activations grow in forward, gradients as
/// activations go. So a plan does what a step does, in the same order, with
/// bytes in place of tensors: a program (see step_program.h) tells a Rank which
/// units its operators read and which gradients they make, and both write in
/// one Account. A few dozen events for each layer, whatever its size.
class Rank {
 public:
  virtual ~Rank() = default;

  virtual void begin_forward() = 0;
  /// `reduces`: this backward averages gradients over the ranks.
  virtual void begin_backward(bool reduces) = 0;
  /// An operator reads parameters of the unit.
  virtual void touch(size_t unit) = 0;
  /// Backward made the gradient of a parameter, or added to it.
  virtual void add_gradient(size_t unit, size_t param) = 0;
  /// All gradients of the unit are there.
  virtual void finish_unit(size_t unit) = 0;
  virtual void end_backward() = 0;
  /// The optimizer's step, and gradients cleared.
  virtual void step() = 0;
};

/// A rank that holds its parameters already. All arguments must outlive it.
std::unique_ptr<Rank> make_rank(
    const Model& model,
    const TrainingSetup& setup,
    Account& account);

} // namespace tessera::plan
