// apply_activation_checkpointing(): elements of a Sequential are replaced by
// wrappers that recompute them.
#include <tessera/error.h>
#include <tessera/recompute/recompute.h>

#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "engine/names.h"

namespace tessera {
namespace {

using torch::nn::AnyModule;
using torch::nn::AnyValue;
using torch::nn::Module;
using torch::nn::SequentialImpl;

/// Takes the place of the module it wraps in a Sequential.
class CheckpointWrapper : public Module {
 public:
  CheckpointWrapper(AnyModule wrapped, const RecomputeOptions& options)
      : Module("tessera::CheckpointWrapper"),
        wrapped_(std::move(wrapped)),
        options_(options) {
    train(wrapped_.ptr()->is_training()); // before it has children to notify
    register_module(std::string(engine::kCheckpointSegment), wrapped_.ptr());
  }

  std::shared_ptr<Module> clone(
      const std::optional<at::Device>& device) const override {
    return std::make_shared<CheckpointWrapper>(
        wrapped_.clone(device), options_);
  }

  /// Makes AnyModule believe that this can be called; it calls call().
  at::Tensor forward(at::Tensor input) {
    std::vector<AnyValue> arguments;
    arguments.emplace_back(std::move(input));
    return call(std::move(arguments));
  }

  at::Tensor call(std::vector<AnyValue> arguments);

 private:
  AnyModule wrapped_;
  RecomputeOptions options_;
};

constexpr size_t kMaxArguments = 8;

template <size_t... Is>
AnyValue call_with(
    AnyModule& module,
    std::vector<AnyValue>& arguments,
    std::index_sequence<Is...>) {
  return module.any_forward(std::move(arguments[Is])...);
}

/// AnyModule takes arguments one by one; here their number is known at run time
/// only.
template <size_t N = 0>
AnyValue call_any(AnyModule& module, std::vector<AnyValue>&& arguments) {
  if constexpr (N < kMaxArguments) {
    if (arguments.size() > N) {
      return call_any<N + 1>(module, std::move(arguments));
    }
  }
  return call_with(module, arguments, std::make_index_sequence<N>());
}

at::Tensor CheckpointWrapper::call(std::vector<AnyValue> arguments) {
  if (arguments.size() > kMaxArguments) {
    raise(
        {.call = "apply_activation_checkpointing"},
        fmt::format(
            "{} was called with {} arguments, at most {} can be passed on.",
            wrapped_.ptr()->name(),
            arguments.size(),
            kMaxArguments));
  }
  std::vector<at::Tensor> tensors;
  std::vector<size_t> positions; // of these among the arguments
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (const auto* tensor = arguments[i].try_get<at::Tensor>()) {
      tensors.push_back(*tensor);
      positions.push_back(i);
    }
  }
  const auto run = [wrapped = wrapped_, arguments, positions](
                       const std::vector<at::Tensor>& inputs) mutable {
    auto values = arguments;
    for (size_t i = 0; i < positions.size(); ++i) {
      values[positions[i]] = AnyValue(inputs[i]);
    }
    AnyValue result = call_any(wrapped, std::move(values));
    if (auto* tensor = result.try_get<at::Tensor>()) {
      return std::vector<at::Tensor>{std::move(*tensor)};
    }
    raise(
        {.call = "apply_activation_checkpointing"},
        fmt::format(
            "{} returns {}, but only modules that return a tensor can be recomputed as a whole. Call tessera::recompute in its own forward.",
            wrapped.ptr()->name(),
            c10::demangle(result.type_info().name())));
  };
  return recompute(run, tensors, options_).front();
}

/// The elements of a Sequential that is recomputed as a whole. It is a
/// Sequential itself, so that its elements are found and replaced like others.
class Elements : public SequentialImpl {
 public:
  explicit Elements(SequentialImpl& from) {
    train(from.is_training()); // before it has children to notify
    const auto names = from.named_children().keys();
    size_t position = 0;
    for (AnyModule& element : from) {
      push_back(names[position++], element);
    }
  }

  std::shared_ptr<Module> clone(
      const std::optional<at::Device>& /*device*/) const override {
    raise<c10::NotImplementedError>(
        {.call = "clone"},
        "a torch::nn::Sequential that is recomputed as a whole cannot be cloned, since LibTorch would give the elements of the clone other names. Clone the model first, then call apply_activation_checkpointing on both.");
  }

  /// Makes AnyModule believe that this can be called; it calls call().
  at::Tensor forward(at::Tensor input) {
    return SequentialImpl::forward(std::move(input));
  }

  AnyValue call(std::vector<AnyValue> arguments) {
    TORCH_CHECK(!is_empty(), "Cannot call forward() on an empty Sequential");
    AnyValue value = call_any(*begin(), std::move(arguments));
    for (auto element = begin() + 1; element != end(); ++element) {
      value = element->any_forward(std::move(value));
    }
    return value;
  }
};

/// Holds a module whose call() takes any number of arguments, which a forward()
/// cannot.
template <class M>
struct CallHolder : torch::nn::AnyModulePlaceholder {
  explicit CallHolder(std::shared_ptr<M> held)
      : AnyModulePlaceholder(typeid(M)), module(std::move(held)) {}

  AnyValue forward(std::vector<AnyValue>&& arguments) override {
    return AnyValue(module->call(std::move(arguments)));
  }
  std::shared_ptr<Module> ptr() override {
    return module;
  }
  std::unique_ptr<AnyModulePlaceholder> copy() const override {
    return std::make_unique<CallHolder>(*this);
  }
  std::unique_ptr<AnyModulePlaceholder> clone_module(
      std::optional<at::Device> device) const override {
    return std::make_unique<CallHolder>(
        std::dynamic_pointer_cast<M>(module->clone(device)));
  }

  std::shared_ptr<M> module;
};

} // namespace
} // namespace tessera

template <>
struct torch::nn::AnyModuleHolder<tessera::CheckpointWrapper, at::Tensor>
    : tessera::CallHolder<tessera::CheckpointWrapper> {
  using CallHolder::CallHolder;
};

template <>
struct torch::nn::AnyModuleHolder<tessera::Elements, at::Tensor>
    : tessera::CallHolder<tessera::Elements> {
  using CallHolder::CallHolder;
};

namespace tessera {
namespace {

/// An element of a Sequential that is to be replaced.
struct Element {
  SequentialImpl* sequential;
  std::string name; // in its registry
  std::shared_ptr<Module> module;
};

bool holds(const SequentialImpl& sequential, const Module* module) {
  return std::any_of(
      sequential.begin(), sequential.end(), [&](const AnyModule& element) {
        return element.ptr().get() == module;
      });
}

/// True for a Sequential whose elements are under recompute as a whole.
bool is_checkpointed(const Module& module) {
  const auto* sequential = dynamic_cast<const SequentialImpl*>(&module);
  return sequential != nullptr && sequential->size() == 1 &&
      sequential->named_children().contains(
          std::string(engine::kCheckpointSegment));
}

/// The changes that apply_activation_checkpointing() makes.
struct Changes {
  struct Parts {
    RecomputesSubmodules* model;
    std::vector<const Module*> submodules;
  };
  std::vector<Element> elements;
  std::vector<SequentialImpl*> wholes; // members, each once
  std::vector<Parts> parts; // of models that run them in their own way
};

/// Finds what to change below a module; throws if something cannot be changed.
class Finder {
 public:
  explicit Finder(const std::function<bool(const Module&)>& which)
      : which_(which) {}

  Changes find(Module& module) {
    descend(module, "");
    return std::move(changes_);
  }

 private:
  void descend(Module& module, const std::string& prefix) {
    if (auto* model = dynamic_cast<RecomputesSubmodules*>(&module)) {
      add_parts(*model, module);
      return;
    }
    const bool is_wrapper =
        dynamic_cast<CheckpointWrapper*>(&module) != nullptr;
    for (const auto& child : module.named_children()) {
      const std::string name = prefix + child.key();
      const auto& submodule = child.value();
      const bool is_wrapped = is_wrapper || is_checkpointed(*submodule) ||
          dynamic_cast<CheckpointWrapper*>(submodule.get()) != nullptr;
      if (!is_wrapped && which_(*submodule)) {
        add(module, child.key(), submodule, engine::clean_name(name));
      }
      descend(*submodule, name + ".");
    }
  }

  void add_parts(RecomputesSubmodules& model, const Module& module) {
    std::vector<const Module*> chosen;
    for (const auto& submodule : module.modules(/*include_self=*/false)) {
      if (which_(*submodule)) {
        chosen.push_back(submodule.get());
      }
    }
    if (!chosen.empty()) {
      changes_.parts.push_back({&model, std::move(chosen)});
    }
  }

  void add(
      Module& parent,
      const std::string& key,
      const std::shared_ptr<Module>& submodule,
      const std::string& name) {
    auto* sequential = dynamic_cast<SequentialImpl*>(&parent);
    if (sequential != nullptr && holds(*sequential, submodule.get())) {
      changes_.elements.push_back({sequential, key, submodule});
      return;
    }
    auto* whole = dynamic_cast<SequentialImpl*>(submodule.get());
    if (whole == nullptr) {
      refuse(
          name,
          *submodule,
          fmt::format(
              "is not an element of a torch::nn::Sequential, nor a Sequential itself, so its parent calls it through a member that cannot be replaced. Call tessera::recompute in the forward of {} instead.",
              parent.name()));
    }
    if (!whole->parameters(/*recurse=*/false).empty() ||
        !whole->buffers(/*recurse=*/false).empty() ||
        whole->children().size() != whole->size()) {
      refuse(
          name,
          *submodule,
          fmt::format(
              "is a torch::nn::Sequential with parameters, buffers or submodules beside its elements, which its forward may use. Call tessera::recompute in the forward of {} instead.",
              parent.name()));
    }
    auto& wholes = changes_.wholes;
    if (std::find(wholes.begin(), wholes.end(), whole) == wholes.end()) {
      wholes.push_back(whole);
    }
  }

  [[noreturn]] static void refuse(
      const std::string& name,
      const Module& module,
      const std::string& why) {
    raise(
        {.call = "apply_activation_checkpointing"},
        fmt::format("submodule \"{}\" ({}) {}", name, module.name(), why));
  }

  const std::function<bool(const Module&)>& which_;
  Changes changes_;
};

/// Puts the elements of a Sequential under one wrapper. The object stays where
/// its parent's member points, and so does its class.
void wrap_elements(
    SequentialImpl& sequential,
    const RecomputeOptions& options) {
  SequentialImpl outer;
  outer.train(sequential.is_training()); // before it has children to notify
  outer.push_back(
      std::string(engine::kCheckpointSegment),
      std::make_shared<CheckpointWrapper>(
          AnyModule(std::make_shared<Elements>(sequential)), options));
  sequential = std::move(outer);
}

} // namespace

int64_t apply_activation_checkpointing(
    ModuleRef module,
    const std::function<bool(const Module&)>& which,
    const RecomputeOptions& options) {
  const Changes changes = Finder(which).find(module);
  size_t num_parts = 0;
  for (const auto& [model, submodules] : changes.parts) {
    model->recompute_submodules(submodules, options);
    num_parts += submodules.size();
  }
  // Makes one wrapper per module, however often the module is an element.
  std::unordered_map<const Module*, std::shared_ptr<CheckpointWrapper>>
      wrappers;
  for (const auto& [sequential, name, wrapped] : changes.elements) {
    auto& wrapper = wrappers[wrapped.get()];
    for (AnyModule& element : *sequential) {
      if (element.ptr() == wrapped) {
        if (!wrapper) {
          wrapper = std::make_shared<CheckpointWrapper>(element, options);
        }
        element = AnyModule(wrapper);
      }
    }
    sequential->replace_module(name, wrapper);
  }
  // Elements first: the elements of a Sequential that is wrapped as a whole
  // move.
  for (SequentialImpl* whole : changes.wholes) {
    wrap_elements(*whole, options);
  }
  return static_cast<int64_t>(
      wrappers.size() + changes.wholes.size() + num_parts);
}

} // namespace tessera
