#pragma once

#include <tessera/api.h>
#include <tessera/optim/device_skip.h>
#include <tessera/optim/optimizer.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera::optim {

/// Options as in Python's torch.optim.Adam.
struct TESSERA_API AdamOptions : OptionsOf<AdamOptions> {
  /// With Python's defaults, and this learning rate.
  AdamOptions() = default;
  AdamOptions(double lr); // NOLINT: Adam(parameters, 3e-4) is meant

  /// As in Python, with its defaults.
  TESSERA_OPTION(double, lr){1e-3};
  TESSERA_OPTION(Betas, betas){{0.9, 0.999}};
  TESSERA_OPTION(double, eps){1e-8};
  TESSERA_OPTION(double, weight_decay){0};
  /// Use the largest of the second moments so far.
  TESSERA_OPTION(bool, amsgrad){false};
  /// Maximize instead of minimize.
  TESSERA_OPTION(bool, maximize){false};
  /// Which implementation Python uses; kept for Python, ignored here.
  TESSERA_OPTION(std::optional<bool>, foreach){};
  TESSERA_OPTION(std::optional<bool>, fused){};
  /// Kept for compatibility with Python, without effect: every step can be
  /// captured in a CUDA graph, since steps are counted on the parameters'
  /// device and nothing is read back. CapturedStep also puts the learning rate
  /// on the device. A graph that you capture yourself keeps the rate that it
  /// was captured with, and needs the optimizer's state to exist: make one step
  /// first, or call initialize_state().
  TESSERA_OPTION(bool, capturable){false};
  /// Shrink parameters by lr * weight_decay, as AdamW does, instead of adding
  /// weight_decay * parameter to the gradient.
  TESSERA_OPTION(bool, decoupled_weight_decay){false};

 public:
  /// See Options.
  std::vector<OptionField> fields() override;
};

/// Adam on ATen's fused kernel: all parameters of a group in one call, each
/// element read and written once. State: "step", "exp_avg", "exp_avg_sq", and
/// with amsgrad "max_exp_avg_sq".
class TESSERA_API Adam : public Optimizer, public DeviceSkip {
 public:
  /// Takes groups or parameters: tessera::parameters(module), or leaves. Throws
  /// as Optimizer's constructor does. Not collective.
  explicit Adam(
      const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
      AdamOptions defaults = {});
  explicit Adam(std::vector<at::Tensor> params, AdamOptions defaults = {});

  bool skip_where(const at::Tensor& found_inf) override;
  std::optional<std::string> capture_objection() const override;

 protected:
  void update(const Options& options, Batch& batch) override;
  std::vector<StateField> state_fields() const override;

 private:
  at::Tensor found_inf_; // of skip_where()
};

} // namespace tessera::optim
