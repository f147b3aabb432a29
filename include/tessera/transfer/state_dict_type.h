#pragma once

#include <tessera/api.h>
#include <tessera/module_ref.h>

#include <torch/arg.h>
#include <torch/nn/module.h>

#include <optional>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

/// What state dicts of a sharded model hold.
enum class StateDictType {
  FullStateDict, // whole tensors
  LocalStateDict, // this rank's tensors, as optimizers have them
  ShardedStateDict, // ShardedTensor values: this rank's part with its place
};

/// Config of FullStateDict for a model.
struct TESSERA_API FullStateDictConfig {
  /// Tensors in host memory.
  TORCH_ARG(bool, offload_to_cpu) = false;
  /// Only rank 0 gets the state; the other ranks get an empty dictionary.
  TORCH_ARG(bool, rank0_only) = false;
};
/// Config of LocalStateDict for a model.
struct TESSERA_API LocalStateDictConfig {
  /// Tensors in host memory.
  TORCH_ARG(bool, offload_to_cpu) = false;
};
/// Config of ShardedStateDict for a model.
struct TESSERA_API ShardedStateDictConfig {
  /// Tensors in host memory.
  TORCH_ARG(bool, offload_to_cpu) = false;
};

/// Config of FullStateDict for optimizers.
struct TESSERA_API FullOptimStateDictConfig {
  /// Tensors in host memory.
  TORCH_ARG(bool, offload_to_cpu) = true;
  /// Only rank 0 gets the state; the other ranks get an empty dictionary, and
  /// load from rank 0's.
  TORCH_ARG(bool, rank0_only) = false;
};
/// Config of LocalStateDict for optimizers.
struct TESSERA_API LocalOptimStateDictConfig {
  /// Tensors in host memory.
  TORCH_ARG(bool, offload_to_cpu) = false;
};
/// Config of ShardedStateDict for optimizers.
struct TESSERA_API ShardedOptimStateDictConfig {
  /// Tensors in host memory.
  TORCH_ARG(bool, offload_to_cpu) = true;
};

/// One of the configs, for the type that it belongs to.
using StateDictConfig = std::
    variant<FullStateDictConfig, LocalStateDictConfig, ShardedStateDictConfig>;
using OptimStateDictConfig = std::variant<
    FullOptimStateDictConfig,
    LocalOptimStateDictConfig,
    ShardedOptimStateDictConfig>;

/// A type with its configs.
struct TESSERA_API StateDictSettings {
  /// Both configs are of this type.
  StateDictType type = StateDictType::FullStateDict;
  StateDictConfig config = FullStateDictConfig();
  OptimStateDictConfig optim_config = FullOptimStateDictConfig();

  /// With the defaults of that type.
  static StateDictSettings of(StateDictType type);
};

/// Sets what state_dict(), load_state_dict(), optim_state_dict() and
/// optim_state_dict_to_load() of the module do, for all units in it; returns
/// what was set before. A config left out takes the type's defaults. Units of
/// FSDP start with FullStateDict, those of fully_shard with
/// ShardedStateDict. Not collective, but must be called on all ranks alike.
///
/// Throws c10::ValueError, with nothing changed, for a config of another type,
/// and if the module has no units, or units that were set differently.
TESSERA_API StateDictSettings set_state_dict_type(
    ModuleRef module,
    StateDictType type,
    std::optional<StateDictConfig> config = std::nullopt,
    std::optional<OptimStateDictConfig> optim_config = std::nullopt);
TESSERA_API StateDictSettings
set_state_dict_type(ModuleRef module, const StateDictSettings& settings);

/// Throws c10::ValueError unless all units of the module agree.
TESSERA_API StateDictSettings get_state_dict_type(ModuleRef module);

/// Sets the type while the guard lives, then restores the one before.
class [[nodiscard]] TESSERA_API StateDictTypeGuard {
 public:
  /// As set_state_dict_type(). The module must outlive the guard.
  StateDictTypeGuard(
      ModuleRef module,
      StateDictType type,
      std::optional<StateDictConfig> config = std::nullopt,
      std::optional<OptimStateDictConfig> optim_config = std::nullopt);
  ~StateDictTypeGuard();
  StateDictTypeGuard(const StateDictTypeGuard&) = delete;
  StateDictTypeGuard& operator=(const StateDictTypeGuard&) = delete;

 private:
  torch::nn::Module& module_;
  const StateDictSettings before_;
};

} // namespace tessera
