#pragma once

#include <tessera/api.h>
#include <tessera/optim/optimizer.h>

#include <optional>
#include <vector>

namespace tessera::optim {

/// Options as in Python's torch.optim.Adagrad.
struct TESSERA_API AdagradOptions : OptionsOf<AdagradOptions> {
  /// With Python's defaults, and this learning rate.
  AdagradOptions() = default;
  AdagradOptions(double lr); // NOLINT: Adagrad(parameters, 0.1) is meant

  /// As in Python, with its defaults.
  TESSERA_OPTION(double, lr){1e-2};
  TESSERA_OPTION(double, lr_decay){0};
  TESSERA_OPTION(double, eps){1e-10};
  TESSERA_OPTION(double, weight_decay){0};
  TESSERA_OPTION(double, initial_accumulator_value){0};
  /// Maximize instead of minimize.
  TESSERA_OPTION(bool, maximize){false};
  /// Which implementation Python uses; kept for Python, ignored here.
  TESSERA_OPTION(std::optional<bool>, foreach){};
  TESSERA_OPTION(std::optional<bool>, fused){};

 public:
  /// See Options.
  std::vector<OptionField> fields() override;
};

/// Adagrad, on the CPU by ATen's fused kernel. State: "step", "sum". The state
/// is created when a parameter first has a gradient; Python creates it at
/// construction.
class TESSERA_API Adagrad : public Optimizer {
 public:
  /// Takes groups or parameters: tessera::parameters(module), or leaves. Throws
  /// as Optimizer's constructor does. Not collective.
  explicit Adagrad(
      const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
      AdagradOptions defaults = {});
  explicit Adagrad(
      std::vector<at::Tensor> params,
      AdagradOptions defaults = {});

 protected:
  void update(const Options& options, Batch& batch) override;
  std::vector<StateField> state_fields() const override;
};

} // namespace tessera::optim
