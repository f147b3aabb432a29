#include "plan/exported_program.h"

#include "checkpoint/disk/input.h"
#include "exported/format/archive_reader.h"
#include "plan/activations/repeated_blocks.h"
#include "plan/checked.h"

namespace tessera::plan {
namespace {

void replay(const StepEvents& events, Rank& rank, Account& account) {
  for (const StepEvent& event : events) {
    switch (event.kind) {
      case StepEvent::Kind::Allocate:
        account.device.add(Kind::Activations, event.bytes);
        break;
      case StepEvent::Kind::Free:
        account.device.drop(Kind::Activations, event.bytes);
        break;
      case StepEvent::Kind::Touch:
        rank.touch(event.unit);
        break;
      case StepEvent::Kind::Gradient:
        rank.add_gradient(event.unit, event.param);
        break;
      case StepEvent::Kind::FinishUnit:
        rank.finish_unit(event.unit);
        break;
      case StepEvent::Kind::Compute:
        account.clock.compute(event.flops);
        break;
    }
  }
}

} // namespace

std::shared_ptr<const exported::Program> read_training_program(
    const std::filesystem::path& path) {
  const auto resolved = checkpoint::resolve(path);
  const auto input = checkpoint::open_input(resolved);
  auto archive = checkpoint::parsing(checkpoint::quoted(resolved), [&] {
    return exported::read_archive(
        checkpoint::part_of(input.file, resolved, 0, input.bytes));
  });
  const auto found = archive.programs.find("model");
  auto& program = found != archive.programs.end()
      ? found->second
      : archive.programs.begin()->second;
  return std::make_shared<const exported::Program>(std::move(program));
}

Walk walk_of(const ProgramRun& run, Device device) {
  WalkOptions options{
      .device = device,
      .params = run.params,
      .recomputed = {},
      .loss_dtype = run.loss_dtype};
  if (run.recomputes) {
    options.recomputed = repeated_blocks(*run.program);
    if (options.recomputed.empty()) {
      throw PlanError(
          "--recompute: the program has no repeated blocks, which are elements of a numbered list of one class. Leave it out.");
    }
  }
  return walk_through(
      *run.program, GraphSizes(*run.program, run.sizes), options);
}

void ExportedProgram::forward(Rank& rank, Account& account) const {
  replay(walk_.forward, rank, account);
}

void ExportedProgram::backward(Rank& rank, Account& account) const {
  replay(walk_.backward, rank, account);
}

} // namespace tessera::plan
