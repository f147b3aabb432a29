// The gradients of a unit: from a backward to the leaves.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <vector>

namespace tessera::engine {

class Unit;

/// Full gradients come from the faces, wait in the unit's bundles, are averaged
/// between the ranks, and are added to the leaves' gradients.
class UnitGradients {
 public:
  explicit UnitGradients(Unit& unit) : unit_(unit) {}

  /// Off: gradients of a backward wait here for the next one that has it on.
  void set_syncs(bool on) {
    syncs_ = on;
  }
  bool syncs() const {
    return syncs_;
  }
  /// Off: gradients are averaged over the shard group only, and wait.
  void set_all_reduces(bool on) {
    all_reduces_ = on;
  }

  bool all_reduces() const {
    return all_reduces_;
  }

  /// Takes the gradients of all faces, by position. Returns whether any of them
  /// is trainable.
  bool add(std::vector<at::Tensor>&& gradients);
  /// The engine visits the leaves behind the node with undefined gradients and
  /// would call their hooks with these. Until release_hooks(), at the end of
  /// the backward, the unit keeps the hooks and calls them with the average.
  void hold_hooks();
  void release_hooks() noexcept;

  /// True if gradients wait that the next reduction would take.
  bool has_waiting() const;
  /// True if any gradients are held: waiting, or averaged without all-reduce.
  bool holds_any() const;
  void start_reduction();
  bool is_reducing() const;
  /// In hybrid sharding: waits for the averages over the shard group and starts
  /// those over the copies. False if there is nothing to start.
  bool go_on_to_copies();
  /// How a reduction ended.
  struct Reduction {
    /// By position: this rank had a gradient. Where it had none and the leaf
    /// had none before either, zeros stand in until drop_unused().
    std::vector<bool> used;
    std::exception_ptr failure; // of a user's hook
  };
  /// Waits for the reduction and adds the average to the leaves' gradients.
  Reduction finish_reduction();
  /// Waits for the reduction and returns the average, by position.
  std::vector<at::Tensor> finish_reduction_apart();
  /// Makes gradients undefined again that no rank had, since zeros would make
  /// optimizers act.
  void drop_unused(const std::vector<bool>& used_by_any);
  void drop_reduction() noexcept;

 private:
  struct Average {
    std::vector<at::Tensor> gradients; // by position
    std::vector<bool> used; // by position: this rank had a gradient
  };
  Average wait();

  Unit& unit_;

  // The user's, between backwards.
  bool syncs_ = true;
  bool all_reduces_ = true;

  std::vector<bool> zeros_stand_in_; // by position, see Reduction
};

} // namespace tessera::engine
