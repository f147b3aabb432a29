// A program of an archive of torch.export: its graph tells the activations.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "checkpoint/format/dtype.h"
#include "exported/format/program.h"
#include "plan/activations/graph_sizes.h"
#include "plan/activations/graph_walk.h"
#include "plan/model.h"
#include "plan/setup.h"
#include "plan/step_program.h"

namespace tessera::plan {

/// The program for training in an archive. Throws FileError.
std::shared_ptr<const exported::Program> read_training_program(
    const std::filesystem::path& path);

/// A program, and how it is run.
struct ProgramRun {
  std::shared_ptr<const exported::Program> program;
  std::map<std::string, ParamPlace> params; // by path
  InputSizes sizes;
  bool recomputes = false; // each repeated block under recompute()
  format::DType loss_dtype = format::DType::Float32;
};

/// What a step of the program does. Throws PlanError for sizes that it was not
/// exported for, and if there are no blocks to recompute or they cannot be;
/// exported::UnknownSize if sizes depend on data.
Walk walk_of(const ProgramRun& run, Device device);

/// Does what a walk says.
class ExportedProgram : public Program {
 public:
  explicit ExportedProgram(Walk walk) : walk_(std::move(walk)) {}
  void forward(Rank& rank, Account& account) const override;
  void backward(Rank& rank, Account& account) const override;

 private:
  const Walk walk_;
};

} // namespace tessera::plan
