// Parameters as views of few large tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::zero {

/// One bucket per owner and device: the trainable parameters lie in it one
/// after another, so that it is sent as a whole and nothing is packed. Frozen
/// parameters have memory of their own.
class ParamBuckets {
 public:
  /// Moves the parameters, `owned` by each rank, into new buckets. Other
  /// tensors that shared their memory keep the old memory.
  void build(const std::vector<std::vector<at::Tensor>>& owned);

  /// False once a parameter was frozen or thawed, or was moved out of its
  /// bucket (module.to() does so).
  bool are_current() const;

  /// For each owner, the buckets and the frozen parameters.
  const std::vector<std::vector<at::Tensor>>& pieces() const {
    return pieces_;
  }

 private:
  struct Slot {
    at::Tensor param;
    bool is_trainable;
    at::Tensor bucket; // undefined for frozen ones
  };

  void fill(
      std::vector<at::Tensor>& pieces,
      const std::vector<at::Tensor>& params);

  std::vector<Slot> slots_;
  std::vector<std::vector<at::Tensor>> pieces_;
};

} // namespace tessera::zero
