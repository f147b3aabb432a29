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
/// last step is over. Outside the chosen steps it costs nothing.
///
/// No function is collective. An error in writing causes a warning and does not
/// stop training. Only one trace per process at a time; Python's profiler in
/// the same process counts as one.
class TESSERA_API StepTrace {
 public:
  /// Both steps included. Throws c10::ValueError if they are in the wrong
  /// order.
  StepTrace(
      const std::filesystem::path& folder,
      int64_t first_step,
      int64_t last_step);
  /// Writes the trace so far, if steps are being traced.
  ~StepTrace();
  StepTrace(const StepTrace&) = delete;
  StepTrace& operator=(const StepTrace&) = delete;

  /// Begins step `step`, which ends the one before. Steps must increase, and
  /// need not begin at 0.
  void at_step(int64_t step);
  /// Ends the current step, and writes the trace if steps were traced. For the
  /// end of training; calling it again does nothing.
  void close();

  /// The file of this rank. It exists once the last step is over.
  const std::filesystem::path& path() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace tessera
