#include "optim/lbfgs_access.h"

#include <ATen/ops/scalar_tensor.h>
#include <torch/optim/lbfgs.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <deque>
#include <utility>
#include <vector>

#include "engine/unit.h"
#include "optim/option_fields.h"
#include "optim/state_values.h"

namespace tessera::optim {
namespace {

using torch::optim::LBFGSOptions;
using torch::optim::LBFGSParamState;

std::vector<OptionField> fields_of(LBFGSOptions& options) {
  return {
      {"lr", &options.lr()},
      {"max_iter", &options.max_iter()},
      {"max_eval", &options.max_eval()},
      {"tolerance_grad", &options.tolerance_grad()},
      {"tolerance_change", &options.tolerance_change()},
      {"history_size", &options.history_size()},
      {"line_search_fn", &options.line_search_fn()}};
}

template <class Tensors>
StateValue list_of(const Tensors& tensors) {
  StateList list;
  for (const at::Tensor& tensor : tensors) {
    list.push_back(tensor.defined() ? StateValue(tensor) : StateValue());
  }
  return list;
}

/// LBFGS keeps one state for all parameters, as flat tensors, with the first
/// parameter.
class LBFGSAccess : public LibTorchAccess {
 public:
  explicit LBFGSAccess(const std::vector<at::Tensor>& params)
      : first_(
            params.empty() ? nullptr : params.front().unsafeGetTensorImpl()) {
    for (const at::Tensor& param : params) {
      numel_ += param.numel();
    }
  }

  std::string name() const override {
    return "torch::optim::LBFGS";
  }

  void write_options(
      const torch::optim::OptimizerOptions& options,
      StateDict& group) const override {
    auto copy = static_cast<const LBFGSOptions&>(options);
    write_fields(fields_of(copy), group);
  }

  std::unique_ptr<torch::optim::OptimizerOptions> read_options(
      const torch::optim::OptimizerOptions& current,
      const StateDict& group,
      const ErrorSite& site,
      const std::string& where) const override {
    auto options = std::make_unique<LBFGSOptions>(
        static_cast<const LBFGSOptions&>(current));
    const auto fields = fields_of(*options);
    refuse_unknown_keys(fields, group, site, where);
    read_fields(fields, group, site, where);
    return options;
  }

  StateDict write_state(
      const torch::optim::OptimizerParamState& base) const override {
    const auto& state = static_cast<const LBFGSParamState&>(base);
    StateDict values{
        {"func_evals", state.func_evals()}, {"n_iter", state.n_iter()}};
    if (state.al()) {
      values.set("al", list_of(*state.al()));
    }
    if (!state.d().defined()) {
      return values; // it stopped before the first direction
    }
    values.set("d", state.d());
    values.set("t", state.t());
    values.set("old_dirs", list_of(state.old_dirs()));
    values.set("old_stps", list_of(state.old_stps()));
    values.set("ro", list_of(state.ro()));
    values.set("H_diag", state.H_diag());
    values.set("prev_flat_grad", state.prev_flat_grad());
    values.set("prev_loss", state.prev_loss());
    return values;
  }

  void check_state(
      const at::Tensor& param,
      const torch::optim::OptimizerOptions& /*options*/,
      const StateDict& values,
      const ErrorSite& site) const override {
    if (param.unsafeGetTensorImpl() != first_) {
      raise<c10::ValueError>(
          site,
          "LBFGS keeps its state with the first parameter. Is the order of the parameters the same as when it was saved?");
    }
    for (const auto& [key, value] : values) {
      check_value(key, value, site);
    }
    const size_t num_later =
        std::count_if(kLater.begin(), kLater.end(), [&](const char* name) {
          return values.contains(name);
        });
    for (const char* name : {"func_evals", "n_iter"}) {
      refuse_missing(values, name, site);
    }
    for (const char* name : kLater) {
      if (num_later > 0) {
        refuse_missing(values, name, site);
      }
    }
  }

  std::unique_ptr<torch::optim::OptimizerParamState> read_state(
      const at::Tensor& param,
      const StateDict& values) const override {
    auto state = std::make_unique<LBFGSParamState>();
    state->func_evals(values.at("func_evals").to_int());
    state->n_iter(values.at("n_iter").to_int());
    const StateValue* al = values.find("al");
    if (al != nullptr && !al->is_none()) {
      state->al(tensors_of<std::vector<at::Tensor>>(param, *al));
    }
    if (!values.contains("d")) {
      return state;
    }
    state->d(copy_for(param, values.at("d")).tensor());
    state->t(scalar_of("t", values.at("t"), {}));
    using Deque = std::deque<at::Tensor>;
    state->old_dirs(tensors_of<Deque>(param, values.at("old_dirs")));
    state->old_stps(tensors_of<Deque>(param, values.at("old_stps")));
    state->ro(tensors_of<Deque>(param, values.at("ro")));
    const StateValue& diagonal = values.at("H_diag"); // Python's may be 1
    state->H_diag(
        diagonal.is_tensor()
            ? copy_for(param, diagonal).tensor()
            : at::scalar_tensor(diagonal.to_double(), param.options()));
    state->prev_flat_grad(
        copy_for(param, values.at("prev_flat_grad")).tensor());
    state->prev_loss(scalar_of("prev_loss", values.at("prev_loss"), {}));
    return state;
  }

  /// The state after a call that stops at once because all gradients are zero.
  std::unique_ptr<torch::optim::OptimizerParamState> initial_state(
      const at::Tensor& param,
      const torch::optim::OptimizerOptions& /*options*/) const override {
    if (param.unsafeGetTensorImpl() != first_) {
      return nullptr;
    }
    auto state = std::make_unique<LBFGSParamState>();
    state->func_evals(1);
    return state;
  }

 private:
  /// The state that the first direction adds.
  static constexpr std::array kLater{
      "d",
      "t",
      "old_dirs",
      "old_stps",
      "ro",
      "H_diag",
      "prev_flat_grad",
      "prev_loss"};

  template <class Tensors>
  static Tensors tensors_of(const at::Tensor& param, const StateValue& list) {
    Tensors tensors;
    for (const StateValue& value : list.list()) {
      tensors.push_back(
          value.is_none() ? at::Tensor() : copy_for(param, value).tensor());
    }
    return tensors;
  }

  void refuse_missing(
      const StateDict& values,
      const char* name,
      const ErrorSite& site) const {
    const StateValue* value = values.find(name);
    if (value == nullptr || value->is_none()) {
      raise<c10::ValueError>(
          site,
          fmt::format(
              "there is state, but no \"{}\". Was it saved by another kind of optimizer?",
              name));
    }
  }

  void check_value(
      const StateKey& key,
      const StateValue& value,
      const ErrorSite& site) const {
    const std::string name = key.text();
    if (name == "func_evals" || name == "n_iter") {
      if (!value.is_int()) {
        raise<c10::TypeError>(
            site,
            fmt::format(
                "state \"{}\" is of kind {}, must be an int.",
                name,
                value.kind()));
      }
    } else if (name == "t" || name == "prev_loss") {
      scalar_of(name, value, site);
    } else if (name == "H_diag") {
      scalar_of(name, value, site);
    } else if (name == "d" || name == "prev_flat_grad") {
      check_flat(name, value, site);
    } else if (name == "old_dirs" || name == "old_stps") {
      check_list(name, value, site);
      for (const StateValue& tensor : value.list()) {
        check_flat(name, tensor, site);
      }
    } else if (name == "ro" || name == "al") {
      check_list(name, value, site);
      for (const StateValue& number : value.list()) {
        if (!number.is_none()) {
          scalar_of(name, number, site);
        }
      }
    } else {
      refuse_unknown_state(key, site);
    }
  }

  static void check_list(
      const std::string& name,
      const StateValue& value,
      const ErrorSite& site) {
    if (!value.is_list()) {
      raise<c10::TypeError>(
          site,
          fmt::format(
              "state \"{}\" is of kind {}, must be a list.",
              name,
              value.kind()));
    }
  }

  void check_flat(
      const std::string& name,
      const StateValue& value,
      const ErrorSite& site) const {
    if (!value.is_tensor() || value.tensor().dim() != 1 ||
        value.tensor().numel() != numel_) {
      raise<c10::ValueError>(
          site,
          fmt::format(
              "state \"{}\" must be a flat tensor of {} elements, those of all parameters. Are they the same as when it was saved?",
              name,
              numel_));
    }
  }

  const c10::TensorImpl* first_;
  int64_t numel_ = 0;
};

} // namespace

std::unique_ptr<LibTorchAccess> lbfgs_access_to(
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    std::string_view call) {
  const auto& params = groups.front().params();
  for (size_t i = 0; i < params.size(); ++i) {
    if (engine::is_sharded(params[i])) {
      raise<c10::NotImplementedError>(
          {.call = call},
          fmt::format(
              "torch::optim::LBFGS has a shard as parameter {}. Its dot products would be those of one rank's shards; use an optimizer that works element by element.",
              i));
    }
  }
  return std::make_unique<LBFGSAccess>(params);
}

} // namespace tessera::optim
