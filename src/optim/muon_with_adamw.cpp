#include <tessera/engine/parameters.h>
#include <tessera/error.h>
#include <tessera/optim/muon_with_adamw.h>

#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/embedding.h>

#include <unordered_set>
#include <utility>

#include "engine/unit.h"
#include "optim/shard_origin.h"

namespace tessera::optim {
namespace {

/// What an optimizer has of the weights of embeddings.
std::unordered_set<const c10::TensorImpl*> embeddings_in(
    torch::nn::Module& model) {
  std::unordered_set<const c10::TensorImpl*> found;
  for (const auto& module : model.modules()) {
    if (module->as<torch::nn::EmbeddingImpl>() == nullptr &&
        module->as<torch::nn::EmbeddingBagImpl>() == nullptr) {
      continue;
    }
    for (const at::Tensor& param : module->parameters(/*recurse=*/false)) {
      const engine::Unit* unit = engine::unit_of(param);
      const bool is_face = unit != nullptr && !unit->shows_summoned();
      const at::Tensor given =
          is_face ? unit->params().leaf_of(param.unsafeGetTensorImpl()) : param;
      found.insert(given.unsafeGetTensorImpl());
    }
  }
  return found;
}

} // namespace

at::Tensor MuonWithAdamW::step(
    const torch::optim::Optimizer::LossClosure& closure) {
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode with_grad(true);
    loss = closure();
  }
  for (torch::optim::Optimizer& optimizer : refs()) {
    optimizer.step();
  }
  return loss;
}

void MuonWithAdamW::zero_grad(bool set_to_none) {
  for (torch::optim::Optimizer& optimizer : refs()) {
    optimizer.zero_grad(set_to_none);
  }
}

MuonWithAdamW::Refs MuonWithAdamW::refs() const {
  Refs all;
  if (muon) {
    all.emplace_back(*muon);
  }
  if (adamw) {
    all.emplace_back(*adamw);
  }
  return all;
}

MuonWithAdamW muon_with_adamw(
    ModuleRef model,
    const MuonOptions& muon,
    const AdamWOptions& adamw,
    const TakenByMuon& taken) {
  const auto embeddings = embeddings_in(model);
  std::vector<at::Tensor> matrices;
  std::vector<at::Tensor> others;
  for (const auto& [name, param] : named_parameters(model)) {
    const auto origin = find_origin(param);
    const at::IntArrayRef sizes =
        origin ? at::IntArrayRef(origin->cut.shape) : param.sizes();
    const bool is_for_muon = sizes.size() == 2 &&
        (taken ? taken(name, sizes)
               : !embeddings.contains(param.unsafeGetTensorImpl()));
    (is_for_muon ? matrices : others).push_back(param);
  }
  if (matrices.empty() && others.empty()) {
    raise<c10::ValueError>(
        {.call = "muon_with_adamw"},
        "the model has no parameters. Pass the module that has them.");
  }
  MuonWithAdamW result;
  if (!matrices.empty()) {
    result.muon = std::make_unique<Muon>(std::move(matrices), muon);
  }
  if (!others.empty()) {
    result.adamw = std::make_unique<AdamW>(std::move(others), adamw);
  }
  return result;
}

} // namespace tessera::optim
