#pragma once

#include <tessera/api.h>
#include <tessera/optim/optimizer.h>

#include <optional>
#include <vector>

namespace tessera::optim {

/// Options as in Python's torch.optim.RMSprop.
struct TESSERA_API RMSpropOptions : OptionsOf<RMSpropOptions> {
  /// With Python's defaults, and this learning rate.
  RMSpropOptions() = default;
  RMSpropOptions(double lr); // NOLINT: RMSprop(parameters, 0.01) is meant

  /// As in Python, with its defaults.
  TESSERA_OPTION(double, lr){1e-2};
  TESSERA_OPTION(double, momentum){0};
  TESSERA_OPTION(double, alpha){0.99};
  TESSERA_OPTION(double, eps){1e-8};
  /// Divide by an estimate of the variance, not of the second moment.
  TESSERA_OPTION(bool, centered){false};
  /// Adds weight_decay * parameter to the gradient.
  TESSERA_OPTION(double, weight_decay){0};
  /// Maximize instead of minimize.
  TESSERA_OPTION(bool, maximize){false};
  /// Which implementation Python uses; kept for Python, ignored here.
  TESSERA_OPTION(std::optional<bool>, foreach){};

 public:
  /// See Options.
  std::vector<OptionField> fields() override;
};

/// RMSprop on ATen's foreach kernels. State: "step", "square_avg",
/// "momentum_buffer" with momentum, and "grad_avg" if centered.
class TESSERA_API RMSprop : public Optimizer {
 public:
  /// Takes groups or parameters: tessera::parameters(module), or leaves. Throws
  /// as Optimizer's constructor does. Not collective.
  explicit RMSprop(
      const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
      RMSpropOptions defaults = {});
  explicit RMSprop(
      std::vector<at::Tensor> params,
      RMSpropOptions defaults = {});

 protected:
  void update(const Options& options, Batch& batch) override;
  std::vector<StateField> state_fields() const override;
};

} // namespace tessera::optim
