// The part of a state dict that belongs to some submodules.
#pragma once

#include <tessera/state/state_dict.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::transfer {

/// Selects names below some submodules, and removes their prefixes if asked to.
class SubmoduleSelection {
 public:
  /// Throws c10::ValueError for a submodule that is not in the model.
  SubmoduleSelection(
      std::string_view call,
      torch::nn::Module& model,
      const ModuleRefs& submodules,
      bool keep_prefixes);

  /// The name to use, or nothing if the name is not selected.
  std::optional<std::string> rename(const std::string& name) const;

 private:
  bool keep_prefixes_;
  bool takes_all_;
  std::vector<std::string> prefixes_;
};

/// Adds `value`. Throws c10::ValueError if the name is taken, which can happen
/// only to names without prefixes.
void set_once(
    std::string_view call,
    StateDict& dict,
    const std::string& name,
    StateValue value);

/// The selected part of an optimizer's state dict with names as keys.
StateDict select_osd(
    std::string_view call,
    const StateDict& osd,
    const SubmoduleSelection& selection);

} // namespace tessera::transfer
