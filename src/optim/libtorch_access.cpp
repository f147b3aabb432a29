#include "optim/libtorch_access.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include "optim/lbfgs_access.h"
#include "optim/option_fields.h"
#include "optim/state_values.h"

namespace tessera::optim {
namespace {

using Fixed = OptionField::Fixed;

/// A member of LibTorch's state: its name in Python, and how to reach it.
struct Slot {
  const char* name;
  std::variant<int64_t*, at::Tensor*> value;
  /// Whether LibTorch uses the member with these options.
  bool is_used = true;
};

OptionField absent(const char* key, StateValue value) {
  return {
      key,
      Fixed{
          std::move(value),
          "LibTorch's class has no such option; the class of this name in tessera::optim has."}};
}

OptionField no_maximize() {
  return absent("maximize", false);
}

OptionField no_foreach() {
  return absent("foreach", {});
}

OptionField no_fused() {
  return absent("fused", {});
}

OptionField no_differentiable() {
  return {"differentiable", not_differentiable()};
}

OptionField no_capturable() {
  return {"capturable", not_capturable()};
}

// The options and state of each class, under Python's names, in Python's order.

struct SGDTable {
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;
  static constexpr const char* kName = "torch::optim::SGD";

  static std::vector<OptionField> fields(Options& options) {
    return {
        {"lr", &options.lr()},
        {"momentum", &options.momentum()},
        {"dampening", &options.dampening()},
        {"weight_decay", &options.weight_decay()},
        {"nesterov", &options.nesterov()},
        no_maximize(),
        no_foreach(),
        no_differentiable(),
        no_fused()};
  }

  static std::vector<Slot> slots(State& state, const Options& options) {
    return {
        {"momentum_buffer", &state.momentum_buffer(), options.momentum() != 0}};
  }
};

template <class OptionsType, class StateType>
struct AdamTable {
  using Options = OptionsType;
  using State = StateType;
  static constexpr bool kIsDecoupled =
      std::is_same_v<Options, torch::optim::AdamWOptions>;
  static constexpr const char* kName =
      kIsDecoupled ? "torch::optim::AdamW" : "torch::optim::Adam";

  static std::vector<OptionField> fields(Options& options) {
    return {
        {"lr", &options.lr()},
        {"betas", &options.betas()},
        {"eps", &options.eps()},
        {"weight_decay", &options.weight_decay()},
        {"amsgrad", &options.amsgrad()},
        no_maximize(),
        no_foreach(),
        no_capturable(),
        no_differentiable(),
        no_fused(),
        {"decoupled_weight_decay",
         Fixed{
             kIsDecoupled, "It is False for Adam, True for AdamW; use that."}}};
  }

  static std::vector<Slot> slots(State& state, const Options& options) {
    return {
        {"step", &state.step()},
        {"exp_avg", &state.exp_avg()},
        {"exp_avg_sq", &state.exp_avg_sq()},
        {"max_exp_avg_sq", &state.max_exp_avg_sq(), options.amsgrad()}};
  }
};

struct AdagradTable {
  using Options = torch::optim::AdagradOptions;
  using State = torch::optim::AdagradParamState;
  static constexpr const char* kName = "torch::optim::Adagrad";

  static std::vector<OptionField> fields(Options& options) {
    return {
        {"lr", &options.lr()},
        {"lr_decay", &options.lr_decay()},
        {"eps", &options.eps()},
        {"weight_decay", &options.weight_decay()},
        {"initial_accumulator_value", &options.initial_accumulator_value()},
        no_foreach(),
        no_maximize(),
        no_differentiable(),
        no_fused()};
  }

  static std::vector<Slot> slots(State& state, const Options& /*options*/) {
    return {{"step", &state.step()}, {"sum", &state.sum()}};
  }
};

struct RMSpropTable {
  using Options = torch::optim::RMSpropOptions;
  using State = torch::optim::RMSpropParamState;
  static constexpr const char* kName = "torch::optim::RMSprop";

  static std::vector<OptionField> fields(Options& options) {
    return {
        {"lr", &options.lr()},
        {"momentum", &options.momentum()},
        {"alpha", &options.alpha()},
        {"eps", &options.eps()},
        {"centered", &options.centered()},
        {"weight_decay", &options.weight_decay()},
        no_capturable(),
        no_foreach(),
        no_maximize(),
        no_differentiable()};
  }

  static std::vector<Slot> slots(State& state, const Options& options) {
    return {
        {"step", &state.step()},
        {"square_avg", &state.square_avg()},
        {"momentum_buffer", &state.momentum_buffer(), options.momentum() > 0},
        {"grad_avg", &state.grad_avg(), options.centered()}};
  }
};

template <class Table>
class TableAccess : public LibTorchAccess {
 public:
  using Options = typename Table::Options;
  using State = typename Table::State;

  std::string name() const override {
    return Table::kName;
  }

  void write_options(
      const torch::optim::OptimizerOptions& options,
      StateDict& group) const override {
    auto copy = static_cast<const Options&>(options);
    write_fields(Table::fields(copy), group);
  }

  std::unique_ptr<torch::optim::OptimizerOptions> read_options(
      const torch::optim::OptimizerOptions& current,
      const StateDict& group,
      const ErrorSite& site,
      const std::string& where) const override {
    auto options =
        std::make_unique<Options>(static_cast<const Options&>(current));
    const auto fields = Table::fields(*options);
    refuse_unknown_keys(fields, group, site, where);
    read_fields(fields, group, site, where);
    return options;
  }

  StateDict write_state(
      const torch::optim::OptimizerParamState& state) const override {
    auto copy = static_cast<const State&>(state);
    StateDict values;
    for (const Slot& slot : Table::slots(copy, Options(/*lr=*/0))) {
      if (const auto* number = std::get_if<int64_t*>(&slot.value)) {
        values.set(slot.name, at::full({}, **number, at::kFloat));
      } else if (std::get<at::Tensor*>(slot.value)->defined()) {
        values.set(slot.name, *std::get<at::Tensor*>(slot.value));
      }
    }
    return values;
  }

  void check_state(
      const at::Tensor& param,
      const torch::optim::OptimizerOptions& options,
      const StateDict& values,
      const ErrorSite& site) const override {
    State state;
    const auto slots =
        Table::slots(state, static_cast<const Options&>(options));
    bool has_any = false;
    for (const auto& [key, value] : values) {
      const auto slot = std::find_if(
          slots.begin(), slots.end(), [&, &key = key](const Slot& candidate) {
            return key == StateKey(candidate.name);
          });
      if (slot == slots.end()) {
        refuse_unknown_state(key, site);
      }
      if (value.is_none()) {
        continue;
      }
      has_any = true;
      if (std::holds_alternative<int64_t*>(slot->value)) {
        scalar_of(slot->name, value, site);
      } else {
        check_like_param(param, slot->name, value, site);
      }
    }
    for (const Slot& slot : slots) {
      const StateValue* value = values.find(slot.name);
      if (has_any && slot.is_used && (value == nullptr || value->is_none())) {
        raise<c10::ValueError>(
            site,
            fmt::format(
                "there is state, but no \"{}\". Was it saved by another kind of optimizer, or with other options?",
                slot.name));
      }
    }
  }

  std::unique_ptr<torch::optim::OptimizerParamState> read_state(
      const at::Tensor& param,
      const StateDict& values) const override {
    auto state = std::make_unique<State>();
    bool has_any = false;
    for (const Slot& slot : Table::slots(*state, Options(/*lr=*/0))) {
      const StateValue* value = values.find(slot.name);
      if (value == nullptr || value->is_none()) {
        continue;
      }
      has_any = true;
      if (const auto* number = std::get_if<int64_t*>(&slot.value)) {
        **number = static_cast<int64_t>(scalar_of(slot.name, *value, {}));
      } else {
        at::Tensor copy = at::empty_like(param);
        copy.copy_(value->tensor());
        *std::get<at::Tensor*>(slot.value) = std::move(copy);
      }
    }
    // LibTorch's SGD treats an entry without a buffer as if it had one.
    return has_any ? std::move(state) : nullptr;
  }

  std::unique_ptr<torch::optim::OptimizerParamState> initial_state(
      const at::Tensor& param,
      const torch::optim::OptimizerOptions& options) const override {
    auto state = std::make_unique<State>();
    bool has_any = false;
    for (const Slot& slot :
         Table::slots(*state, static_cast<const Options&>(options))) {
      if (!slot.is_used) {
        continue;
      }
      has_any = true;
      if (const auto* number = std::get_if<int64_t*>(&slot.value)) {
        **number = 1;
      } else {
        *std::get<at::Tensor*>(slot.value) = at::zeros_like(param);
      }
    }
    return has_any ? std::move(state) : nullptr;
  }
};

template <class T>
bool is(const torch::optim::Optimizer& optimizer) {
  return dynamic_cast<const T*>(&optimizer) != nullptr;
}

using LibTorchAdamTable =
    AdamTable<torch::optim::AdamOptions, torch::optim::AdamParamState>;
using LibTorchAdamWTable =
    AdamTable<torch::optim::AdamWOptions, torch::optim::AdamWParamState>;

} // namespace

void refuse_unknown_keys(
    const std::vector<OptionField>& fields,
    const StateDict& group,
    const ErrorSite& site,
    const std::string& where) {
  for (const auto& [key, value] : group) {
    const bool is_known = key == StateKey("params") ||
        std::any_of(fields.begin(), fields.end(), [&, &key = key](auto& field) {
                            return key == StateKey(field.key);
                          });
    if (!is_known) {
      raise<c10::ValueError>(
          site,
          fmt::format(
              "{} has the key \"{}\", which LibTorch's class cannot hold. Take it out, or use the class of this name in tessera::optim, which keeps any key.",
              where,
              key.text()));
    }
  }
}

void refuse_unknown_state(const StateKey& key, const ErrorSite& site) {
  raise<c10::ValueError>(
      site,
      fmt::format(
          "there is state \"{}\", which LibTorch's class cannot hold. Take it out, or use the class of this name in tessera::optim, which keeps any state.",
          key.text()));
}

std::unique_ptr<LibTorchAccess> libtorch_access_to(
    const torch::optim::Optimizer& optimizer,
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    std::string_view call) {
  if (is<torch::optim::SGD>(optimizer)) {
    return std::make_unique<TableAccess<SGDTable>>();
  }
  if (is<torch::optim::Adam>(optimizer)) {
    return std::make_unique<TableAccess<LibTorchAdamTable>>();
  }
  if (is<torch::optim::AdamW>(optimizer)) {
    return std::make_unique<TableAccess<LibTorchAdamWTable>>();
  }
  if (is<torch::optim::Adagrad>(optimizer)) {
    return std::make_unique<TableAccess<AdagradTable>>();
  }
  if (is<torch::optim::RMSprop>(optimizer)) {
    return std::make_unique<TableAccess<RMSpropTable>>();
  }
  if (is<torch::optim::LBFGS>(optimizer)) {
    return lbfgs_access_to(groups, call);
  }
  raise<c10::TypeError>(
      {.call = call},
      fmt::format(
          "the state of {} is not supported. Derive your optimizer from tessera::optim::Optimizer, or from tessera::optim::StatefulOptimizer beside its base.",
          c10::demangle(typeid(optimizer).name())));
}

} // namespace tessera::optim
