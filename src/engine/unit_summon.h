// The full parameters of a unit, shown to the user.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "libtorch/autograd_compat.h"

namespace tessera::engine {

class Unit;
enum class UnitState;
struct UnitParam;

struct SummonOptions {
  bool writeback = true;
  bool rank0_only = false;
  bool offload_to_cpu = false;
  bool with_grads = false;
};

/// How a summon ended.
struct SummonEnd {
  bool changed = false; // a rank's edits were written back: gather again
  std::exception_ptr failure;
};

/// Lives while the unit is Summoned, see UnitState::Summoned.
class UnitSummon {
 public:
  /// Collective over the shard group. The unit is Sharded or Full.
  UnitSummon(Unit& unit, const SummonOptions& options);
  /// Shows the full parameters, on the ranks that are to see them.
  void show();
  /// Writes back what the user changed, if asked. Collective; throws nothing.
  SummonEnd write_back();
  /// Shows what was shown before. The unit is no longer Summoned.
  void hide();

  /// What faces show is writable and whole on this rank.
  bool is_shown() const {
    return is_shown_;
  }
  /// The state of the unit then.
  UnitState before() const {
    return before_;
  }
  /// By bundle: a copy, or the shard. Only while shown.
  const std::vector<at::Tensor>& full() const {
    return full_;
  }
  /// True where write_back() would undo a write to the shard.
  bool undoes_writes() const;

 private:
  std::vector<at::Tensor> gather_gradients() const;
  void show(const UnitParam& param, const at::Tensor& gradient) const;
  std::optional<std::string> objection_to_faces() const;
  bool shows_shard() const;
  bool compares_copies() const;
  at::Tensor my_values(const UnitParam& param) const;
  bool was_written() const;
  std::optional<std::string> differs_between_copies() const;
  void note_writes_in_place() const;
  std::string what_became_of_writes() const;
  void write_back_values() const;
  void write_back_gradients() const;

  // Constant after construction.
  Unit& unit_;
  const SummonOptions options_;
  const UnitState before_;
  const bool is_shown_; // on this rank
  const libtorch::NodePtr node_; // no face owns it meanwhile
  std::vector<at::Tensor> full_;

  std::vector<at::Tensor> gradients_; // by position, until they are shown
  std::vector<uint32_t> versions_; // of the faces, by position
  std::vector<uint64_t>
      digests_; // where the shard itself is shown and compared
  bool is_ending_ = false;
};

} // namespace tessera::engine
