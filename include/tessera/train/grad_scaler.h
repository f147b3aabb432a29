#pragma once

#include <tessera/api.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/group.h>
#include <tessera/module_ref.h>
#include <tessera/state/state_dict.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace tessera {

/// Options of GradScaler, with the names and defaults of Python's.
struct TESSERA_API GradScalerOptions {
  /// The scale to begin with.
  TORCH_ARG(double, init_scale) = 65536;
  /// The scale is multiplied by this after growth_interval steps in a row whose
  /// gradients were finite.
  TORCH_ARG(double, growth_factor) = 2;
  /// The scale is multiplied by this if a gradient was not finite.
  TORCH_ARG(double, backoff_factor) = 0.5;
  TORCH_ARG(int64_t, growth_interval) = 2000;
  /// If off, losses are not scaled and step() is the optimizer's.
  TORCH_ARG(bool, enabled) = true;
  /// The ranks that train together; default: the world, or this process alone
  /// before init().
  TORCH_ARG(std::optional<Group>, group) = std::nullopt;
};

/// Scales losses so that float16 gradients do not vanish, and leaves out steps
/// whose gradients are not finite on any rank, as Python's torch.amp.GradScaler
/// does and with its arithmetic:
///
///   scaler.scale(loss).backward();
///   scaler.unscale_(optimizer);               // only to clip
///   scaler.clip_grad_norm_(model, 1.0);       // may be left out
///   scaler.step(optimizer);
///   scaler.update();
///
/// It takes sharded, data-parallel and plain models, and any optimizer; several
/// optimizers may share a scaler. The ranks agree: if a gradient of an
/// optimizer is infinite or NaN on one rank, every rank leaves out the step of
/// that optimizer, and the scale backs off on every rank. That costs one
/// reduction of a float per optimizer, for all optimizers that were unscaled
/// since the last one. It costs nothing after clip_grad_norm_() of a sharded
/// model, since the norm shows whether all gradients are finite.
///
/// Scale and growth tracker live on the device of the first loss. On a GPU,
/// nothing waits for the device if the optimizer is an optim::DeviceSkip (Adam,
/// AdamW): its kernel leaves out the step. For other optimizers, step() reads
/// one number from the device, as in Python.
///
/// All ranks make the same calls, with equal options and equal state: the first
/// step() after construction, load_state_dict() or a setter throws
/// DisagreementError on every rank if they differ. Shards that are empty and
/// parameters without a gradient are finite. Not thread-safe.
class TESSERA_API GradScaler : public checkpoint::Stateful {
 public:
  /// Throws c10::ValueError unless growth_factor is above 1, backoff_factor
  /// between 0 and 1, init_scale positive and growth_interval at least 1. Not
  /// collective.
  explicit GradScaler(const GradScalerOptions& options = {});
  ~GradScaler() override;
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  /// The loss, or several, times the scale. Not collective.
  at::Tensor scale(const at::Tensor& outputs);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  /// Divides the gradients of the optimizer's parameters by the scale, and
  /// notes whether all are finite. step() does it if the program did not. Call
  /// it at most once per optimizer and update(), when all gradients are there.
  ///
  /// Throws c10::Error if it was called since the last update(), or if nothing
  /// was scaled yet; c10::ValueError for parameters in float16 and for an
  /// optimizer that steps inside backward. Not collective.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// tessera::clip_grad_norm_() for gradients that were unscaled. Steps of
  /// optimizers that were unscaled, and not stepped yet, are left out if the
  /// norm is not finite. Throws c10::Error if there is no such optimizer.
  /// Collective.
  at::Tensor clip_grad_norm_(
      ModuleRef model,
      double max_norm,
      double norm_type = 2.0);

  /// Unscales if unscale_() was not called, then steps if the gradients of this
  /// optimizer are finite on all ranks. Returns what the optimizer's step()
  /// returns: nothing if the step was left out.
  ///
  /// Throws as unscale_() does; c10::Error if it was called since the last
  /// update(); c10::NotImplementedError for a closure, as in Python, unless the
  /// scaler is off. Collective.
  at::Tensor step(
      torch::optim::Optimizer& optimizer,
      torch::optim::Optimizer::LossClosure closure = nullptr);

  /// Adapts the scale: call it once, after the steps of all optimizers. With
  /// `new_scale` sets it. Throws c10::Error if no gradient was unscaled,
  /// c10::ValueError for a scale that is not positive. Collective if an
  /// optimizer was unscaled and not stepped.
  void update(std::optional<double> new_scale = std::nullopt);

  /// Forgets what was unscaled since the last update(), and keeps the scale:
  /// after an exception. Not collective.
  void discard();

  /// Whether a step before the last update() was left out: a scheduler should
  /// not count such steps. The same on all ranks. Reads the device. Not
  /// collective, like all functions below.
  bool skipped() const;

  /// The current scale; 1 if the scaler is off. Reads the device.
  double get_scale() const;
  bool is_enabled() const;
  /// See GradScalerOptions. Setters throw as the constructor does.
  double get_growth_factor() const;
  void set_growth_factor(double new_factor);
  double get_backoff_factor() const;
  void set_backoff_factor(double new_factor);
  int64_t get_growth_interval() const;
  void set_growth_interval(int64_t new_interval);

  /// Python's dictionary: "scale", "growth_factor", "backoff_factor",
  /// "growth_interval", "_growth_tracker". Empty if the scaler is off. Call it
  /// after update(). Reads the device.
  StateDict state_dict() override;
  /// Takes such a dictionary, also one of Python's. Does nothing if the scaler
  /// is off. Throws c10::ValueError, with nothing changed, for a dictionary
  /// that is empty, lacks a key or has a value out of range.
  void load_state_dict(const StateDict& state) override;
  void check_state_dict(const StateDict& state) const override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace tessera
