// Converts optimizers to and from dictionaries in Python's form.
#pragma once

#include <tessera/error.h>
#include <tessera/optim/state_dict.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tessera::optim {

/// What reading and writing dictionaries requires of a class of optimizers.
/// Functions that read throw and change nothing if something does not fit.
class Access {
 public:
  virtual ~Access() = default;

  /// "AdamW", "torch::optim::AdamW".
  virtual std::string name() const = 0;

  virtual void write_options(
      const torch::optim::OptimizerOptions& options,
      StateDict& group) const = 0;
  /// Returns `current` updated with the options in `group`. `where` is "param
  /// group 1".
  virtual std::unique_ptr<torch::optim::OptimizerOptions> read_options(
      const torch::optim::OptimizerOptions& current,
      const StateDict& group,
      const ErrorSite& site,
      const std::string& where) const = 0;

  virtual StateDict write_state(
      const torch::optim::OptimizerParamState& state) const = 0;
  /// Throws unless read_state() can be called.
  virtual void check_state(
      const at::Tensor& param,
      const torch::optim::OptimizerOptions& options,
      const StateDict& values,
      const ErrorSite& site) const = 0;
  /// The result shares no memory with `values`, except where a value is the
  /// optimizer's own tensor already. Null if `values` mean the same as no
  /// state.
  virtual std::unique_ptr<torch::optim::OptimizerParamState> read_state(
      const at::Tensor& param,
      const StateDict& values) const = 0;
};

/// The access to an optimizer of Tessera's or LibTorch's, whose groups may be
/// kept elsewhere; throws c10::TypeError for others. Valid as long as the
/// optimizer is.
std::unique_ptr<Access> access_to(
    const torch::optim::Optimizer& optimizer,
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    std::string_view call);

/// Names of parameters by their TensorImpl. If empty, parameters are numbered.
using ParamNames = std::unordered_map<const c10::TensorImpl*, std::string>;

StateDict write_dictionary(
    const torch::optim::Optimizer& optimizer,
    const Access& access,
    const ParamNames* names = nullptr);

void read_dictionary(
    torch::optim::Optimizer& optimizer,
    const Access& access,
    const StateDict& dict,
    const ParamNames* names = nullptr);

/// The functions of StatefulOptimizer with these names, for any optimizer.
bool has_state(const torch::optim::Optimizer& optimizer);
StateDict collect_state_dict(torch::optim::Optimizer& optimizer, Collect to);
/// A tensor of the state that one of Tessera's optimizers has of a parameter;
/// undefined if there is none of that name.
at::Tensor state_tensor_of(
    const torch::optim::Optimizer& optimizer,
    const at::Tensor& param,
    const StateKey& name);
bool keeps_state_of(
    const torch::optim::Optimizer& optimizer,
    const at::Tensor& param);
std::function<void()> snapshot(torch::optim::Optimizer& optimizer);

/// Throws if the parameter has a gradient: a step is pending, so this is not
/// the time to create state. `name` is the optimizer's.
void refuse_gradient(
    const at::Tensor& param,
    int64_t number,
    std::string_view name);

} // namespace tessera::optim
