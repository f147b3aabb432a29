#pragma once

#include <tessera/api.h>
#include <tessera/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace tessera::optim {

/// Options as in Python's torch.optim.Muon.
struct TESSERA_API MuonOptions : OptionsOf<MuonOptions> {
  /// With Python's defaults, and this learning rate.
  MuonOptions() = default;
  MuonOptions(double lr); // NOLINT: Muon(parameters, 0.02) is meant

  /// As in Python, with its defaults.
  TESSERA_OPTION(double, lr){1e-3};
  /// Shrinks parameters by lr * weight_decay, as AdamW does.
  TESSERA_OPTION(double, weight_decay){0.1};
  TESSERA_OPTION(double, momentum){0.95};
  TESSERA_OPTION(bool, nesterov){true};
  /// The coefficients of the Newton-Schulz iteration, which makes updates
  /// orthogonal.
  TESSERA_OPTION(NsCoefficients, ns_coefficients){{3.4445, -4.7750, 2.0315}};
  /// The least norm that an update is divided by.
  TESSERA_OPTION(double, eps){1e-7};
  /// Steps of the iteration, fewer than 100.
  TESSERA_OPTION(int64_t, ns_steps){5};
  /// How the learning rate depends on a matrix of A rows and B columns:
  /// "original", times sqrt(max(1, A / B)), which is the default; or
  /// "match_rms_adamw", times 0.2 sqrt(max(A, B)), which suits learning rates
  /// and weight decay of AdamW.
  TESSERA_OPTION(std::optional<std::string>, adjust_lr_fn){};

 public:
  /// See Options.
  std::vector<OptionField> fields() override;
  std::optional<std::string> objection() const override;
};

/// Muon: momentum whose update is made orthogonal, by an iteration in bfloat16
/// on the whole matrix, as in Python. For the matrices inside a network; give
/// the other parameters to AdamW (muon_with_adamw() does both). State:
/// "momentum_buffer".
///
/// [Note: Muon on shards]
///
/// Momentum stays sharded like the gradient. For the iteration each matrix has
/// an owner among the N ranks that share it: the parts of the update are sent
/// to the owner, and the parts of the result are sent back, both in bfloat16,
/// so a rank receives about 2/N of all matrices. Owners are chosen by the
/// multiplications that matrices take, so that ranks have about the same to
/// do. The result has the same bits as in one process that has the same
/// gradients.
///
/// Matrices travel in batches: while one is computed the next one is sent, and
/// the results of the last one return. At most three batches are in memory at
/// a time, each with the matrices that this rank owns in the batch and this
/// rank's parts of all matrices of the batch. See set_batch_bytes().
///
/// So step() is collective over the ranks that share a matrix: every rank calls
/// it, also one that has nothing of any matrix. Before anything changes, the
/// ranks compare options, parameters and which of them have gradients, and
/// throw DisagreementError on all ranks if these differ. An error of one rank's
/// gradients comes on all ranks. Under hybrid sharding each copy of the model
/// does the same work by itself. Whole tensors (plain ones,
/// DistributedDataParallel, ZeroRedundancyOptimizer) are updated without
/// communication.
class TESSERA_API Muon : public Optimizer {
 public:
  /// Takes groups or parameters: tessera::parameters(module), or leaves. Throws
  /// as Optimizer's constructor does, and c10::ValueError for parameters whose
  /// whole shape has other than two dims, for complex ones, and for the one
  /// flat parameter of an FSDP unit without use_orig_params. Not collective.
  explicit Muon(
      const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
      MuonOptions defaults = {});
  explicit Muon(std::vector<at::Tensor> params, MuonOptions defaults = {});

  /// Throws as the constructor does.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) override;

  /// How many bytes the matrices may have, in bfloat16, that a rank owns in one
  /// batch; a larger matrix is a batch by itself. Smaller batches take less
  /// memory and more messages. The same on all ranks. Throws c10::ValueError if
  /// it is not above 0.
  void set_batch_bytes(int64_t bytes);
  /// 16 MiB unless it was set.
  int64_t batch_bytes() const {
    return batch_bytes_;
  }

 protected:
  void update(const Options& options, Batch& batch) override;
  void initialize(const Options& options, Batch& batch) override;
  std::vector<StateField> state_fields() const override;
  bool is_stepped_together(const at::Tensor& param) const override;
  void check_step(const std::function<void()>& checks) override;
  void step_together() override;

 private:
  struct Shared;

  void check_params(const torch::optim::OptimizerParamGroup& group) const;
  std::vector<Shared> find_shared();
  void step_shared(Shared& shared);
  at::Tensor momentum_of(const at::Tensor& param);

  int64_t batch_bytes_ = int64_t{16} << 20;
};

} // namespace tessera::optim
