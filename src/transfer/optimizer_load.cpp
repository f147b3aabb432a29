#include "transfer/optimizer_load.h"

#include <tessera/error.h>
#include <tessera/optim/named_optimizer.h>

#include <optional>

#include "comm/group/all_or_none.h"
#include "optim/dictionary.h"
#include "transfer/flat_optim_dict.h"
#include "transfer/load_optim_state.h"
#include "transfer/optim_tensors.h"
#include "transfer/split_optim_state.h"
#include "transfer/state_dict_options.h"

namespace tessera::transfer {

OptimizerLoad::OptimizerLoad(
    const char* call,
    torch::nn::Module& model,
    const OptimizerRefs& optimizers,
    const StateDict& dict,
    const StateDictOptions& options)
    : call_(call), optimizers_(optimizers) {
  check_options(call, options);
  const ModelParams params(model, call);
  groups_ = groups_for(params, options);
  const Group group = params.root_group();
  const bool from_rank0 = options.broadcast_from_rank0() && group.valid();
  std::vector<TensorGroups> tensors;
  std::vector<StateDict> parts(optimizers.size());
  comm::all_or_none(groups_, call, [&] {
    OptimNames names;
    for (const torch::optim::Optimizer& optimizer : optimizers) {
      tensors.push_back(tensors_of(optimizer));
      names.push_back(names_of(OptimTensors(params, tensors.back(), call)));
    }
    if (!from_rank0 || group.rank() == 0) {
      parts = split(dict, params, names, options);
    }
  });
  for (size_t i = 0; i < optimizers.size(); ++i) {
    to_load_.push_back(load_optim_state(
        model,
        {.call = call,
         .osd = parts[i],
         .tensors = tensors[i],
         .from = from_rank0 ? LoadFrom::Rank0 : LoadFrom::Shards,
         .keeps_names = dynamic_cast<const optim::NamedOptimizer*>(
                            &optimizers[i].get()) != nullptr,
         .group = from_rank0 ? std::optional(group) : std::nullopt,
         .keeps =
             [&optimizer = optimizers[i].get()](const at::Tensor& param) {
               return optim::keeps_state_of(optimizer, param);
             },
         .current =
             [&optimizer = optimizers[i].get()](
                 const at::Tensor& param, const StateKey& name) {
               return optim::state_tensor_of(optimizer, param, name);
             }}));
  }
}

void OptimizerLoad::apply() {
  before_ = load_together(groups_, call_, optimizers_, to_load_);
  to_load_.clear();
}

void OptimizerLoad::undo() {
  load_back(before_);
}

std::vector<StateDict> OptimizerLoad::split(
    const StateDict& dict,
    const ModelParams& params,
    const OptimNames& names,
    const StateDictOptions& options) const {
  if (dict.empty() && !optimizers_.empty()) {
    raise(
        {.call = call_},
        "the state dict is empty, but there are optimizers. Pass a state dict; with broadcast_from_rank0, on rank 0.");
  }
  if (!options.flatten_optimizer_state_dict()) {
    return split_osd(call_, dict, params, names, options.strict());
  }
  std::vector<std::string> unexpected;
  const StateDict osd = unflatten_osd(call_, dict, names, unexpected);
  return split_osd(
      call_, osd, params, names, options.strict(), std::move(unexpected));
}

} // namespace tessera::transfer
