// Dictionaries of Tessera's own optimizers.
#pragma once

#include <tessera/error.h>
#include <tessera/optim/optimizer.h>

#include <string_view>

#include "optim/dictionary.h"

namespace tessera::optim {

class OwnAccess : public Access {
 public:
  explicit OwnAccess(const Optimizer& optimizer) : optimizer_(optimizer) {}

  std::string name() const override;
  void write_options(
      const torch::optim::OptimizerOptions& options,
      StateDict& group) const override;
  std::unique_ptr<torch::optim::OptimizerOptions> read_options(
      const torch::optim::OptimizerOptions& current,
      const StateDict& group,
      const ErrorSite& site,
      const std::string& where) const override;
  StateDict write_state(
      const torch::optim::OptimizerParamState& state) const override;
  void check_state(
      const at::Tensor& param,
      const torch::optim::OptimizerOptions& options,
      const StateDict& values,
      const ErrorSite& site) const override;
  std::unique_ptr<torch::optim::OptimizerParamState> read_state(
      const at::Tensor& param,
      const StateDict& values) const override;

 private:
  /// A copy completed by the defaults: groups that were added since the last
  /// step may lack options.
  std::unique_ptr<torch::optim::OptimizerOptions> complete_copy(
      const torch::optim::OptimizerOptions& options,
      const ErrorSite& site) const;
  void refuse_others_state(const StateKey& name, const ErrorSite& site) const;
  void refuse_others_option(const StateKey& name, const ErrorSite& site) const;
  /// Null if the class has no state of that name.
  const StateField* field(const StateKey& name) const;

  const Optimizer& optimizer_;
  const std::vector<StateField> fields_ = optimizer_.state_fields();
};

/// Throws c10::TypeError unless the options are of the class of the defaults.
void check_class(
    const torch::optim::OptimizerOptions& options,
    const Optimizer& optimizer,
    const ErrorSite& site);

/// Throws c10::ValueError if a value is out of range.
void check_options(Options& options, const ErrorSite& site);

} // namespace tessera::optim
