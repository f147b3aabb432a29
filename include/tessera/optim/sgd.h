#pragma once

#include <tessera/api.h>
#include <tessera/optim/optimizer.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera::optim {

/// Options as in Python's torch.optim.SGD.
struct TESSERA_API SGDOptions : OptionsOf<SGDOptions> {
  /// With Python's defaults, and this learning rate.
  SGDOptions() = default;
  SGDOptions(double lr); // NOLINT: SGD(parameters, 0.1) is meant

  /// As in Python, with its defaults.
  TESSERA_OPTION(double, lr){1e-3};
  TESSERA_OPTION(double, momentum){0};
  /// The first gradient enters the momentum undampened.
  TESSERA_OPTION(double, dampening){0};
  /// Adds weight_decay * parameter to the gradient.
  TESSERA_OPTION(double, weight_decay){0};
  /// Needs momentum and no dampening.
  TESSERA_OPTION(bool, nesterov){false};
  /// Maximize instead of minimize.
  TESSERA_OPTION(bool, maximize){false};
  /// Which implementation Python uses; kept for Python, ignored here.
  TESSERA_OPTION(std::optional<bool>, foreach){};
  TESSERA_OPTION(std::optional<bool>, fused){};

 public:
  /// See Options.
  std::vector<OptionField> fields() override;
  std::optional<std::string> objection() const override;
};

/// SGD on ATen's fused kernel. State: "momentum_buffer", if there is momentum.
class TESSERA_API SGD : public Optimizer {
 public:
  /// Takes groups or parameters: tessera::parameters(module), or leaves. Throws
  /// as Optimizer's constructor does. Not collective.
  explicit SGD(
      const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
      SGDOptions defaults = {});
  explicit SGD(std::vector<at::Tensor> params, SGDOptions defaults = {});

  std::optional<std::string> capture_objection() const override;

 protected:
  void update(const Options& options, Batch& batch) override;
  std::vector<StateField> state_fields() const override;
};

} // namespace tessera::optim
