// The values of a model's parameters and buffers, for a state dict.
#pragma once

#include <tessera/state/state_dict.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <ATen/core/Tensor.h>

#include <optional>
#include <unordered_map>
#include <vector>

#include "transfer/model_params.h"
#include "transfer/state_entries.h"

namespace tessera::transfer {

/// Reads values from the shards of the model's units.
class ModelReader {
 public:
  /// `params` and `options` must outlive the reader.
  ModelReader(const ModelParams& params, const StateDictOptions& options);

  /// False on ranks whose dictionary stays empty.
  bool keeps() const {
    return is_root_;
  }
  /// False for frozen parameters, if the options say to leave them out.
  bool wants(const StateEntry& entry) const;
  /// Values of the entries, in their order; None on ranks that do not get them.
  /// Collective for full state.
  std::vector<StateValue> read(const std::vector<StateEntry>& entries);

 private:
  const ModelParam* sharded_param_of(const StateEntry& entry) const;
  void gather_sharded(const std::vector<StateEntry>& entries);
  StateValue read(const StateEntry& entry) const;

  const StateDictOptions& options_;
  std::unordered_map<const c10::TensorImpl*, const ModelParam*> params_;
  std::unordered_map<const ModelParam*, at::Tensor> wholes_;
  std::optional<int> root_; // a rank of the world
  bool is_root_ = true;
};

} // namespace tessera::transfer
