// The keys of an optimizer's state dict: numbers and names.
#pragma once

#include <tessera/state/state_dict.h>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

namespace tessera::transfer {

/// An optimizer's numbers and the names that go with them.
class NumbersAndNames {
 public:
  explicit NumbersAndNames(const char* call) : call_(call) {}

  void add(int64_t id, const std::string& name);
  /// The key as a number, or as a name. A key of that kind stays. Throws
  /// c10::ValueError if the optimizer has no such parameter.
  StateKey change(const StateKey& key, bool to_ids) const;

 private:
  const char* call_;
  std::unordered_map<std::string, int64_t> ids_;
  std::unordered_map<int64_t, std::string> names_;
  std::vector<std::string> known_;
};

/// The names of this rank's own tensors, which are the keys of a
/// LOCAL_STATE_DICT. Throws c10::ValueError if a parameter of the optimizer is
/// not in the model.
NumbersAndNames local_names(
    const char* call,
    torch::nn::Module& model,
    const torch::optim::Optimizer& optim);

/// `osd` with other keys, also in "params"; numbers there are in ascending
/// order, as Python's functions return them.
StateDict with_keys(
    const StateDict& osd,
    const std::function<StateKey(const StateKey&)>& change);

} // namespace tessera::transfer
