// Memory by kind at the moment of a step when memory peaked.
#pragma once

#include <tessera/train/monitor.h>

#include <ATen/record_function.h>

#include <cstdint>
#include <optional>
#include <thread>

#include "comm/diagnostics/observer.h"
#include "train/memory_census.h"

namespace tessera::train {

/// [Note: memory at the peak]
///
/// The allocator knows the peak, but not what it consisted of; units, leaves
/// and optimizers know what they hold, but not when the peak is. So they are
/// asked at certain points of the step: on the CPU inside allocations, whenever
/// the peak has grown by about a hundredth; on a GPU, whose allocator calls
/// nobody, when a collective starts and when a backward begins, with the
/// allocator's peak since the point before. What they hold at the point of the
/// highest peak is taken as what they held at the peak; the rest of what the
/// step added are activations.
class Peak {
 public:
  /// Begins a step. Only one instance at a time per process.
  explicit Peak(MemoryCensus& holdings);
  /// Forgets the step unless it was finished.
  ~Peak();
  Peak(const Peak&) = delete;
  Peak& operator=(const Peak&) = delete;

  MemoryByKind finish();

 private:
  void start_on_device();
  static std::unique_ptr<at::ObserverContext> on_backward(
      const at::RecordFunction& function);
  void look_at_device();
  void stop();

  const MemoryCensus& holdings_;
  int64_t live_ = 0; // at the start
  int64_t unknown_ = 0; // of that, none of the kinds
  MemoryByKind first_; // held at the start
  const std::thread::id thread_ = std::this_thread::get_id();
  bool is_running_ = true;

  // Used by this thread, or by its backward's thread while this one waits.
  int64_t most_ = 0;
  MemoryByKind at_most_;
  int last_backward_ = -1; // the number of the one that was seen last

  std::optional<at::CallbackHandle> callback_;
  std::optional<comm::CallWatch> watch_; // last: it uses the other members
};

} // namespace tessera::train
