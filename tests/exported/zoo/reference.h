#pragma once

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/exported/value.h>
#include <tessera/state/state_dict.h>

#include <torch/torch.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace tessera::zoo {

/// What export_zoo.py wrote about a model in one dtype: inputs, targets and
/// what Python got.
class Reference {
 public:
  explicit Reference(const std::filesystem::path& file)
      : tensors_(checkpoint::read(file)) {}

  bool contains(const std::string& name) const {
    return tensors_.contains(name);
  }
  at::Tensor at(const std::string& name) const {
    return tensors_.at(name).tensor();
  }
  /// Tensors whose names begin with `prefix`.
  size_t count(const std::string& prefix) const {
    return static_cast<size_t>(
        std::count_if(tensors_.begin(), tensors_.end(), [&](const auto& item) {
          return item.first.text().starts_with(prefix);
        }));
  }

  /// The arguments of forward(): input.0 and so on, then input.NAME.
  ExportedArgs inputs() const {
    ExportedArgs args;
    for (size_t i = 0; contains("input." + std::to_string(i)); ++i) {
      args.add(at("input." + std::to_string(i)));
    }
    for (const auto& [name, input] : named_inputs()) {
      args.set(name, input);
    }
    return args;
  }

  /// Those that are given by name.
  std::vector<std::pair<std::string, at::Tensor>> named_inputs() const {
    const std::string prefix = "input.";
    std::vector<std::pair<std::string, at::Tensor>> inputs;
    for (const auto& [key, value] : tensors_) {
      const auto name = key.text();
      if (name.starts_with(prefix) && !std::isdigit(name.at(prefix.size()))) {
        inputs.emplace_back(name.substr(prefix.size()), value.tensor());
      }
    }
    return inputs;
  }

  /// The sum over floating outputs of mean((output - target)^2), added up as
  /// Python does.
  at::Tensor loss_of(const std::vector<at::Tensor>& outputs) const {
    at::Tensor loss;
    size_t next = 0;
    for (const auto& output : outputs) {
      if (!output.is_floating_point()) {
        continue;
      }
      const auto target = at("target." + std::to_string(next++));
      const auto part = (output - target).square().mean();
      loss = loss.defined() ? loss + part : part;
    }
    return loss;
  }

 private:
  StateDict tensors_;
};

} // namespace tessera::zoo
