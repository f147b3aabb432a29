#pragma once

#include <tessera/api.h>
#include <tessera/module_ref.h>
#include <tessera/state/stateful.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace tessera {

/// Changes averages in place: `averaged` and `current` are of equal length, of
/// one dtype and on one device, and `num_averaged` updates were made before.
using MultiAvgFn = std::function<void(
    const std::vector<at::Tensor>& averaged,
    const std::vector<at::Tensor>& current,
    int64_t num_averaged)>;

/// An exponential moving average: each update makes it decay * average +
/// (1 - decay) * current. Throws c10::ValueError unless decay is from 0 to 1.
TESSERA_API MultiAvgFn get_ema_multi_avg_fn(double decay = 0.999);
/// The mean of all values since the first update, for stochastic weight
/// averaging.
TESSERA_API MultiAvgFn get_swa_multi_avg_fn();

/// Options as in Python's AveragedModel.
struct TESSERA_API AveragedModelOptions {
  /// How averages change; default: get_swa_multi_avg_fn().
  TORCH_ARG(MultiAvgFn, multi_avg_fn) = {};
  /// Average buffers too. If off, buffers are those of the last update.
  TORCH_ARG(bool, use_buffers) = false;
  /// Where averages are kept; default: where the parameters are. With
  /// at::kCPU they take no memory of a GPU.
  TORCH_ARG(std::optional<at::Device>, device) = std::nullopt;
};

class AveragedModel;

/// The scope in which a model has the averages; see AveragedModel::swap_in().
/// It must end before the AveragedModel does.
class [[nodiscard]] TESSERA_API SwappedAverages {
 public:
  SwappedAverages(SwappedAverages&& other) noexcept;
  SwappedAverages& operator=(SwappedAverages&& other) = delete;
  /// Closes the scope, also when an exception passes. Errors are only logged:
  /// call close() to get them.
  ~SwappedAverages();

  /// Gives the model its own values back, bit by bit. Further calls do nothing,
  /// unless this one threw.
  void close();

 private:
  friend class AveragedModel;
  explicit SwappedAverages(AveragedModel& owner) : owner_(&owner) {}

  AveragedModel* owner_; // null when closed
};

/// Averages of a model's parameters over the steps of a run: an exponential
/// moving average (EMA) or stochastic weight averaging (SWA).
///
///   AveragedModel ema(
///       model,
///       AveragedModelOptions().multi_avg_fn(get_ema_multi_avg_fn(0.999)));
///   optimizer.step();
///   ema.update_parameters();
///   {
///     auto averages = ema.swap_in();
///     evaluate(model); // with the averages
///   }
///
/// Each rank keeps the averages of its own shards: nothing is gathered, and
/// there is no second model. Works for plain, data-parallel and sharded models
/// (FSDP with or without use_orig_params, fully_shard). Arithmetic and
/// dictionary are those of Python's AveragedModel; the dtype of an average is
/// that of the shard.
///
/// Updating and swapping are not collective, but all ranks must make the same
/// calls: writing to shards makes each unit gather anew on all ranks. Not
/// thread-safe.
class TESSERA_API AveragedModel : public Stateful {
 public:
  /// Averages begin as copies of the current values. Shard the model first; the
  /// model must outlive this object. Throws c10::ValueError for a parameter
  /// without memory, and c10::Error inside summon_full_params.
  explicit AveragedModel(ModuleRef model, AveragedModelOptions options = {});
  ~AveragedModel() override;
  AveragedModel(const AveragedModel&) = delete;
  AveragedModel& operator=(const AveragedModel&) = delete;

  /// Updates the averages with the current values; the first update copies
  /// them. Call it after optimizer.step(). Throws c10::Error while averages are
  /// swapped in, by this or another AveragedModel of the model, and if the
  /// model was sharded since this object was made.
  void update_parameters();
  /// How many updates were made.
  int64_t n_averaged() const;

  /// Exchanges the values of the model and the averages until the scope is
  /// closed; needs memory for one copy of the largest shard. Do not step an
  /// optimizer inside: the step would change the averages. Throws as
  /// update_parameters() does, with model and averages as they were.
  SwappedAverages swap_in();
  /// Whether averages are swapped in.
  bool is_swapped_in() const;

  /// As Python's AveragedModel names it: "n_averaged", and "module." before the
  /// names of the unsharded model. Sharded parameters are ShardedTensors that
  /// share memory with the averages, so that a checkpoint can be loaded with
  /// another number of ranks and another sharding. Throws c10::Error while
  /// averages are swapped in. Not collective.
  StateDict state_dict() override;
  /// Takes the dictionary that state_dict() returned, once a checkpoint has
  /// been loaded into that dictionary, or a dictionary of another model: full
  /// tensors, the same on all ranks, or sharded tensors of any layout over the
  /// same ranks. Everything is checked first. Throws as
  /// set_model_state_dict() does, and c10::Error while averages are swapped in.
  /// Collective if the model is sharded.
  void load_state_dict(const StateDict& state) override;

 private:
  friend class SwappedAverages;
  class Impl;

  std::unique_ptr<Impl> impl_;
};

} // namespace tessera
