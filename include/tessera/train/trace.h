#pragma once

#include <tessera/api.h>

#include <cstdint>
#include <filesystem>
#include <memory>

namespace tessera {

/// A trace of some steps by LibTorch's profiler, for chrome://tracing or
/// ui.perfetto.dev: every operator, on a GPU every kernel, and what the
/// sharding engine does by name: "gather blocks.3", "reduce blocks.3", "wait
/// for blocks.3", "step 7".
///
///   StepTrace trace("runs/7/trace", 10, 12);
///   for (int64_t step = 0; step < 100; ++step) {
///     trace.at_step(step);
///     ...
///   }
///
/// Each rank writes a file of its own, FOLDER/rank0.json and so on, when the
/// last step is over. Outside of the chosen steps it costs nothing.
///
/// Nothing here is collective. An error in writing is warned of and does not
/// stop training. One trace of a process at a time; Python's profiler in the
/// same process is another.
class TESSERA_API StepTrace {
 public:
  /// Both steps included. Throws c10::ValueError if they are in the wrong
  /// order.
  StepTrace(
      std::filesystem::path folder,
      int64_t first_step,
      int64_t last_step);
  /// Writes what there is, if steps are being traced.
  ~StepTrace();
  StepTrace(const StepTrace&) = delete;
  StepTrace& operator=(const StepTrace&) = delete;

  /// Step `step` begins, and with it the one before ends. Steps grow, and need
  /// not begin at 0.
  void at_step(int64_t step);
  /// Ends the step under way, and writes if steps were traced. For the end of
  /// training; calling it again does nothing.
  void close();

  /// The file of this rank. It is there once the last step is over.
  const std::filesystem::path& path() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace tessera
