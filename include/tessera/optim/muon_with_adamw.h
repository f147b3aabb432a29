#pragma once

#include <tessera/api.h>
#include <tessera/module_ref.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/muon.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera::optim {

/// Two optimizers that together have all parameters of a model: Muon those
/// inside the network that are matrices, AdamW the others. Python has the same
/// two, so their dictionaries and checkpoints are Python's:
///
///   auto optimizers = optim::muon_with_adamw(
///       model, optim::MuonOptions(0.02), optim::AdamWOptions(3e-4));
///   optimizers.step();
///   optimizers.zero_grad();
///   get_state_dict(model, optimizers);  // wherever {a, b} may stand
///
/// A schedule drives one of the two: optim::StepLR(*optimizers.muon, 1000).
struct TESSERA_API MuonWithAdamW {
  /// As a braced list of optimizers makes them.
  using Refs = std::vector<std::reference_wrapper<torch::optim::Optimizer>>;

  std::unique_ptr<Muon> muon; // null if it has no parameters
  std::unique_ptr<AdamW> adamw; // null if it has no parameters

  /// Runs `closure` once, if there is one, with gradients enabled, then both
  /// steps, Muon's first; returns the loss. If AdamW's step throws, Muon's has
  /// been made. Collective over the ranks that share a matrix.
  at::Tensor step(
      const torch::optim::Optimizer::LossClosure& closure = nullptr);
  /// Clears the gradients of both.
  void zero_grad(bool set_to_none = true);

  /// Those that are there, Muon first. This object must outlive them.
  Refs refs() const;
  operator Refs() const { // NOLINT: TrainingState(model, optimizers) is meant
    return refs();
  }
};

/// Returns whether Muon gets a matrix, given the matrix's name, as in
/// named_parameters(), and its whole shape.
using TakenByMuon =
    std::function<bool(const std::string& name, at::IntArrayRef sizes)>;

/// Divides the parameters of a model, sharded or not. Muon gets the matrices
/// for which `taken` is true; by default all but the weights of
/// torch::nn::Embedding and EmbeddingBag, and what is tied to them. AdamW gets
/// the others: Muon's authors advise it for the output layer as well, which
/// `taken` can tell by its name. Call it after sharding.
///
/// Throws c10::ValueError for a model without parameters and as the two
/// constructors do. Not collective.
TESSERA_API MuonWithAdamW muon_with_adamw(
    ModuleRef model,
    const MuonOptions& muon = {},
    const AdamWOptions& adamw = {},
    const TakenByMuon& taken = nullptr);

} // namespace tessera::optim
