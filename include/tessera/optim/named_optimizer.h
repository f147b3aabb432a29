#pragma once

#include <tessera/api.h>
#include <tessera/optim/capturable.h>
#include <tessera/optim/device_skip.h>
#include <tessera/optim/state_dict.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::optim {

/// An optimizer whose dictionary has names instead of numbers, so that it fits
/// any order of the parameters:
///
///   auto adam = std::make_unique<Adam>(tessera::parameters(model), 1e-2);
///   NamedOptimizer optimizer(
///       tessera::named_parameters(model), std::move(adam));
///   optimizer.state_dict().at_path("state.fc.weight.exp_avg");
///
/// It owns the inner optimizer and has its param groups and state: call step(),
/// zero_grad() and add_param_group() here, and give this object to schedulers.
class TESSERA_API NamedOptimizer : public torch::optim::Optimizer,
                                   public StatefulOptimizer,
                                   public DeviceSkip,
                                   public Capturable {
 public:
  /// As tessera::named_parameters() returns them.
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

  /// `named` may have more than the optimizer's parameters. Throws
  /// c10::ValueError if one of them has no name, or if a name stands for two
  /// parameters, and c10::TypeError for a class that state_dict() does not
  /// support.
  NamedOptimizer(
      NamedTensors named,
      std::unique_ptr<torch::optim::Optimizer> optimizer);
  ~NamedOptimizer() override;

  /// The inner optimizer's step.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// The group's parameters must have names too. Hides LibTorch's function.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// See state_dict.h. Loading goes by names: groups are those with the same
  /// parameters, in any order.
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& dict) override;
  void initialize_state() override;

  /// Both ask the inner optimizer.
  bool skip_where(const at::Tensor& found_inf) override;
  std::optional<std::string> capture_objection() const override;

 private:
  class Lend;

  struct Names;

  void exchange_with_inner();
  void check_names(
      const std::vector<torch::optim::OptimizerParamGroup>& groups,
      std::string_view call) const;

  std::unique_ptr<Names> names_;
  std::unique_ptr<torch::optim::Optimizer> inner_;
};

} // namespace tessera::optim
