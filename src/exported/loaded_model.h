// A loaded file and the tensors of one model of it.
#pragma once

#include <tessera/exported/exported.h>

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "exported/code.h"
#include "exported/compiler.h"
#include "exported/format/program.h"
#include "exported/frozen_mode.h"
#include "exported/placement.h"
#include "exported/regions.h"
#include "exported/signature.h"
#include "exported/weights.h"

namespace tessera::exported {

/// What clones of a model share.
struct ModelFile {
  std::filesystem::path path;
  Archive archive;
  /// Of all programs: parameters and buffers, then constants.
  std::vector<WeightSpec> weights;
  size_t num_constants = 0;
  std::vector<SharedMemory> shared;
};

/// A program that is ready to run on one placement.
struct ReadyProgram {
  /// What is done with a value that the program gives.
  struct Output {
    OutputSpec::Kind kind = OutputSpec::Kind::User;
    size_t target = 0; // a weight, or a leaf of the inputs
  };

  Code code;
  std::vector<Output> outputs;
  std::vector<uint32_t> written_weights; // by nodes, in place
  std::vector<uint32_t> replaced_weights; // by outputs, after the run
  /// Those of both that results depend on: a counter that is added to them.
  std::vector<uint32_t> state_weights;
  bool writes_parameters = false; // by nodes; they are not among those above
  std::set<std::string> modules; // that have nodes, those that were folded too
};

/// A program with what does not depend on the placement.
struct ModelProgram {
  ModelProgram(const Program& made_of, WeightNumbers numbers)
      : program(made_of),
        signature(made_of),
        frozen(made_of),
        weights(std::move(numbers)) {}

  const Program& program;
  Signature signature;
  FrozenMode frozen;
  WeightNumbers weights;
};

/// The buffers that results depend on, as they were before the last run that
/// backward follows: see Model::scope().
struct StateBefore {
  std::vector<at::Tensor> values; // of the program's state_weights
  /// The memory of the inputs, to know the second run by. It is compared only.
  std::vector<const void*> inputs;
  bool was_used = false;
  /// Whether an earlier run had the same inputs and may be run again yet.
  bool is_unsure = false;
};

/// The inside of ExportedImpl.
class Model {
 public:
  using Programs = std::vector<std::shared_ptr<const ModelProgram>>;

  /// The program that torch.export.load() takes comes first, then that for
  /// evaluation, if there is one. One tensor for each of `file->weights`.
  Model(
      std::shared_ptr<const ModelFile> file,
      Programs programs,
      std::vector<at::Tensor> weights);

  /// Registers parameters, buffers and submodules, once.
  void build(ExportedImpl& root) const;
  /// Compiles all programs, to see whether they can be run. Runs nothing of
  /// them. Once, before anything else is done with the model.
  void prepare();

  /// What one forward runs, and on what.
  struct Forward {
    const ModelProgram* program = nullptr;
    std::shared_ptr<const ReadyProgram> ready;
    std::vector<c10::IValue> inputs;
  };
  /// Chooses the program and checks the arguments, with nothing run.
  Forward begin(const ExportedArgs& args, bool is_training);
  ExportedValue run(const Forward& forward);

  /// A model of the same file with copies of the tensors; those that are tied
  /// are tied again.
  std::unique_ptr<Model> copy(const std::optional<at::Device>& device) const;

  /// ExportedImpl's, for a mode.
  std::vector<ExportedSpec> inputs(bool is_training) const;
  std::vector<ExportedSpec> results(bool is_training) const;
  /// The steps of a forward, those of nested graphs included.
  size_t num_nodes(bool is_training);
  void set_dtype(at::ScalarType dtype);
  /// Puts the calls of these modules under recompute(), besides those that
  /// already are. Throws, with nothing changed.
  void recompute(
      const std::vector<std::string>& paths,
      const RecomputeOptions& options);
  const std::filesystem::path& path() const {
    return file_->path;
  }
  /// The mode that a new model is in.
  bool begins_in_training() const;

 private:
  const ModelProgram& program_for(bool is_training) const;
  std::shared_ptr<const ReadyProgram> ready(const ModelProgram& program);
  std::shared_ptr<ReadyProgram> compiled(
      const ModelProgram& program,
      Refusals& refusals) const;
  std::shared_ptr<ReadyProgram> compiled(const ModelProgram& program) const;
  std::shared_ptr<const ReadyProgram> make_ready(
      std::shared_ptr<ReadyProgram> compiled,
      const ModelProgram& program,
      const RecomputedModules& recomputed) const;
  RunScope scope(const Forward& forward);
  StateBefore state_before(const Forward& forward);
  Placement placement_now() const;
  void follow_placement();
  bool still_share(const SharedMemory& shared) const;
  void check_shared() const;
  void move_constants(at::Device device);
  void write_back(
      const ReadyProgram& ready,
      const std::vector<c10::IValue>& inputs,
      const std::vector<c10::IValue>& outputs) const;

  std::shared_ptr<const ModelFile> file_;
  Programs programs_;
  std::shared_ptr<const std::vector<at::Tensor>> weights_;
  std::vector<bool> is_fixed_; // by weight; see fixed_weights()
  std::optional<at::ScalarType> dtype_; // that to() gave
  RecomputedModules recomputed_;

  std::mutex mutex_; // guards those below
  Placement placement_; // of compiled_ and ready_
  /// Those that were not used since prepare().
  std::map<const ModelProgram*, std::shared_ptr<ReadyProgram>> compiled_;
  std::map<const ModelProgram*, std::shared_ptr<const ReadyProgram>> ready_;
  std::map<const ModelProgram*, StateBefore> before_;
};

} // namespace tessera::exported
