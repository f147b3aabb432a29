#pragma once

#include <tessera/api.h>
#include <tessera/state/state_dict.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

namespace tessera::optim {

/// The value of an option, and whether it was set: a group takes options that
/// were not set from the optimizer's defaults.
template <class T>
struct Option {
  T value{}; // the default, or the value that was set
  bool is_set = false; // it was set
};

/// For Adam and AdamW: how slowly the first and second moments change.
using Betas = std::tuple<double, double>;

/// For Muon: the factors of x, x^3 and x^5 in a step of its iteration.
using NsCoefficients = std::tuple<double, double, double>;

/// The range of numbers that are allowed.
enum class OptionRange {
  Any,
  NotNegative,
  /// 0 or more and below 1.
  Fraction,
};

/// An option in a table: Python's name for it, and where its value is. All
/// dictionaries are written, read and checked by such tables.
struct TESSERA_API OptionField {
  /// Only one value is supported; `advice` says what to do about another.
  struct Fixed {
    StateValue value; // the only one
    const char* advice; // a sentence for errors
  };
  /// Where the value is.
  using Slot = std::variant<
      double*,
      bool*,
      int64_t*,
      Betas*,
      NsCoefficients*,
      std::optional<bool>*,
      std::optional<int64_t>*,
      std::optional<std::string>*,
      Fixed>;

  /// An option that a group may leave to the defaults, a plain value, or one
  /// that is fixed.
  template <class T>
  OptionField(
      const char* python_key,
      Option<T>& option,
      OptionRange allowed = OptionRange::Any)
      : key(python_key),
        slot(&option.value),
        is_set(&option.is_set),
        range(allowed) {}
  template <class T>
  OptionField(const char* python_key, T* value)
      : key(python_key), slot(value) {}
  OptionField(const char* python_key, Fixed fixed)
      : key(python_key), slot(std::move(fixed)) {}

  const char* key; // Python's name
  Slot slot; // where the value is
  bool* is_set = nullptr; // null if it always counts as set
  OptionRange range = OptionRange::Any; // of numbers
};

/// Declares an option with a setter and a getter, as TORCH_ARG does:
///   TESSERA_OPTION(double, momentum){0.9};
#define TESSERA_OPTION(T, name)                \
 public:                                       \
  auto name(const T& value)->decltype(*this) { \
    this->name##_ = {value, true};             \
    return *this;                              \
  }                                            \
  const T& name() const noexcept {             \
    return this->name##_.value;                \
  }                                            \
                                               \
 private:                                      \
  ::tessera::optim::Option<T> name##_

/// Hyper-parameters of a param group. Besides the options of its class it holds
/// any other key that a program or a checkpoint gives it.
class TESSERA_API Options : public torch::optim::OptimizerOptions {
 public:
  /// The class's own options, by Python's names, in Python's order.
  virtual std::vector<OptionField> fields() = 0;
  /// What is wrong with the values together; nullopt if nothing is.
  virtual std::optional<std::string> objection() const;

  /// Other keys of the group. They survive state_dict() and load_state_dict().
  const StateDict& extra() const {
    return extra_;
  }
  StateDict& extra() {
    return extra_;
  }

  /// A scalar on the device from which kernels read the learning rate in place
  /// of lr; undefined if there is none. Set by CapturedStep; `value` is the
  /// number that the scalar has.
  const at::Tensor& lr_on_device() const {
    return lr_on_device_;
  }
  double value_on_device() const {
    return value_on_device_;
  }
  void lr_on_device(at::Tensor lr, double value) {
    lr_on_device_ = std::move(lr);
    value_on_device_ = value;
  }

  /// Takes options that were not set from `defaults`, which are of the same
  /// class.
  void complete_from(Options& defaults);
  /// Whether that has been done.
  bool is_complete() const {
    return is_complete_;
  }

 private:
  StateDict extra_;
  at::Tensor lr_on_device_;
  double value_on_device_ = 0;
  bool is_complete_ = false;
};

/// Members that the options of all classes share.
template <class Derived>
class OptionsOf : public Options {
 public:
  using Options::extra;
  /// Sets another key.
  Derived& extra(const std::string& key, StateValue value) {
    extra().set(key, std::move(value));
    return self();
  }
  /// True throws c10::NotImplementedError: differentiable steps are not
  /// supported, and only Adam and AdamW have the option `capturable`. See
  /// capturable.h for the optimizers that can be captured.
  Derived& differentiable(bool on);
  Derived& capturable(bool on);

  /// For LibTorch's schedulers and groups.
  double get_lr() const override {
    return static_cast<const Derived&>(*this).lr();
  }
  void set_lr(const double lr) override {
    self().lr(lr);
  }
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<Derived>(static_cast<const Derived&>(*this));
  }

 private:
  Derived& self() {
    return static_cast<Derived&>(*this);
  }
};

namespace detail {
/// Throws c10::NotImplementedError if `on`.
TESSERA_API void refuse_differentiable(bool on);
TESSERA_API void refuse_capturable(bool on);
} // namespace detail

template <class Derived>
Derived& OptionsOf<Derived>::differentiable(bool on) {
  detail::refuse_differentiable(on);
  return self();
}

template <class Derived>
Derived& OptionsOf<Derived>::capturable(bool on) {
  detail::refuse_capturable(on);
  return self();
}

} // namespace tessera::optim
