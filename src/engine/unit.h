// Parameters that are gathered and freed together.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/engine/sharded_tensor.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <any>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/bundle.h"
#include "engine/options.h"
#include "engine/owners.h"
#include "libtorch/autograd_compat.h"

namespace tessera::engine {

class GatherNode;
class Schedule;

enum class UnitState {
  /// Faces have no bytes; a touch gathers. Memory: the shard. Next: Gathering
  /// or Summoned.
  Sharded,
  /// A gather is in flight; a touch waits for it. Memory: shard and full
  /// buffer. Next: Full.
  Gathering,
  /// Faces show the full parameters in the compute dtype. Memory: shard and
  /// full buffer. Next: Sharded or Summoned.
  Full,
  /// Faces show the full parameters in full precision, as leaves that may be
  /// written: a private copy, or the shard itself where this rank has it all
  /// and it is not offloaded. Memory: shard, the copy, and the full buffer if
  /// it was Full before. Next: what it was before; Sharded under mixed
  /// precision, whose copy could not see edits.
  Summoned,
};

/// A parameter as the module registered it.
struct NamedParam {
  std::string name; // below the unit's module
  at::Tensor tensor;
};

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

/// What this rank began with, until the ranks have compared it; see
/// [Note: equal starts].
struct UnitStart {
  std::vector<std::string> names; // of the parameters
  std::vector<uint64_t> digests; // one per parameter
  bool was_written = false; // since
};

/// A unit stands between the module's parameters and this rank's shards; see
/// [Note: storage identity] for how parameters become faces.
///
/// A shard is an ordinary tensor with a leaf for each parameter that views this
/// rank's part of it (or one leaf for all of it, UnitOptions::one_leaf). Leaves
/// are what optimizers get. They carry the key of faces too, so that writes to
/// them are seen: fused optimizers do not bump version counters.
///
/// Faces own their unit: trainable ones through their gradient edge, frozen
/// ones through a hook of their autograd metadata that never runs. The unit
/// knows its faces only weakly; it dies with the module. A unit without
/// parameters is kept by the units below it.
///
/// Writes to shards are counted for all units of a model together: which of its
/// leaves a rank writes depends on what it has, but ranks must gather again
/// alike.
class Unit : public std::enable_shared_from_this<Unit> {
 public:
  /// `number` tells units of a group apart, the same on all ranks. Made by
  /// Schedule::add_unit().
  Unit(
      std::string name,
      int number,
      const Groups& groups,
      const UnitOptions& options,
      std::shared_ptr<Schedule> schedule);
  /// Shards `params`, which must be leaves of their module and not sharded yet.
  /// Deferred ones are replayed, one at a time. Once, before anything else.
  void shard(const std::vector<NamedParam>& params, BufferPool& pool);
  ~Unit();
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  const std::string& name() const {
    return name_;
  }
  void set_name(std::string name);
  int number() const {
    return number_;
  }
  const Groups& groups() const {
    return groups_;
  }
  const UnitOptions& options() const {
    return options_;
  }
  UnitState state() const {
    return state_;
  }
  /// Who drives this unit. For those who found the unit from a tensor; the
  /// unit itself never calls it.
  Schedule& schedule() const {
    return *schedule_;
  }

  /// The module that was sharded, to be recognized by; never followed. Null
  /// once it is gone: its address may be another's by then. `alive` is empty
  /// for a module that no shared_ptr owns.
  const void* home() const {
    return is_home_tracked_ && home_alive_.expired() ? nullptr : home_;
  }
  /// Null if it is gone, or if no shared_ptr owns it.
  std::shared_ptr<const void> lock_home() const {
    return home_alive_.lock();
  }
  void set_home(const void* module, std::weak_ptr<const void> alive) {
    home_ = module;
    is_home_tracked_ = !alive.expired();
    home_alive_ = std::move(alive);
  }
  /// The unit whose module contains this one's.
  void set_parent(std::shared_ptr<Unit> parent) {
    parent_ = std::move(parent);
  }
  bool is_root() const {
    return parent_ == nullptr;
  }
  bool contains(const Unit& other) const;
  /// The unit that contains this one and is contained in none.
  const Unit& root() const;
  Unit& root();

  /// What the front end keeps with the unit; nothing to the unit itself.
  std::any& attachment() {
    return attachment_;
  }

  /// Off: gradients of a backward wait here for the next one that has it on.
  void set_syncs_gradients(bool on) {
    syncs_gradients_ = on;
  }
  bool syncs_gradients() const {
    return syncs_gradients_;
  }
  /// Off: gradients are averaged over the shard group only, and wait.
  void set_all_reduces(bool on) {
    all_reduces_ = on;
  }

  /// The leaf of the parameter whose face has this TensorImpl. With one leaf
  /// for all, that.
  at::Tensor leaf_of(const c10::TensorImpl* face) const;
  /// All leaves, in the order of the parameters, for life.
  std::vector<at::Tensor> leaves() const;
  /// In which bundle that parameter is, and where in its layout.
  struct Place {
    size_t bundle = 0;
    size_t index = 0;
  };
  Place place_of(const c10::TensorImpl* face) const;
  /// The parameter that a leaf holds alone.
  struct LeafParam {
    std::string name; // below the module of the root unit
    std::vector<int64_t> sizes; // of the whole parameter
    std::vector<Box> boxes; // this rank's, in the order of the leaf's elements
  };
  /// Nothing for a tensor that is no leaf of the unit, and for the one leaf of
  /// all parameters.
  std::optional<LeafParam> find_leaf(const c10::TensorImpl* leaf) const;
  /// This rank's part of that parameter, with its place. Shares the leaf's
  /// memory.
  ShardedTensor sharded(const c10::TensorImpl* face) const;
  bool has_params() const {
    return !bundles_.empty();
  }
  const std::vector<Bundle>& bundles() const {
    return bundles_;
  }
  /// What faces show is writable and whole on this rank now.
  bool shows_summoned() const;
  /// The flat shard of a unit of one dtype; while Summoned the flat full
  /// parameters, without padding if they have one leaf.
  at::Tensor flat_param() const;

  /// Freezes or thaws a parameter: its gradient edge, its leaf, a stale
  /// gradient.
  void set_requires_grad(const c10::TensorImpl* face, bool on);

  /// Writes to shards of the whole model that were seen so far.
  int64_t num_writes() const {
    return root().writes_;
  }
  /// True if there were any since this unit was gathered last.
  bool is_stale() const {
    return gathered_at_ != -1 && gathered_at_ != num_writes();
  }
  /// Somebody is about to write to a shard of the unit's. Throws where the end
  /// of a summon would undo it. Several threads may call it at once: a
  /// checkpoint is read by more than one.
  void count_write();

  /// Empty once the ranks have compared it, or where nothing is to compare.
  const std::optional<UnitStart>& start() const {
    return start_;
  }
  void forget_start() {
    start_.reset();
  }

  /// Throws if something replaced the data of a face behind the unit's back.
  void check_faces(const char* call) const;
  /// Freezes and thaws what a user froze or thawed through a face or a leaf.
  void follow_requires_grad();

  /// Kept gathered by the user until reshard() or the end of backward.
  void pin() {
    is_pinned_ = true;
  }
  bool is_pinned() const {
    return is_pinned_;
  }

  /// Returns whether it started one: not unless it was Sharded.
  bool start_gather();
  /// While Gathering. If this throws, the unit is Full of garbage: reshard().
  void finish_gather();
  /// Returns whether it freed the full parameters: not unless it was Full. Not
  /// while Gathering.
  bool reshard();

  /// See Schedule. Not while Gathering.
  void summon(const SummonOptions& options);
  SummonEnd end_summon();

  /// Takes the gradients of all faces, by position. Returns whether any of them
  /// is trainable.
  bool add_gradients(std::vector<at::Tensor>&& gradients);
  /// The engine visits the leaves behind the node with undefined gradients and
  /// would call their hooks with these. Until release_hooks(), at the end of
  /// the backward, the unit keeps the hooks and calls them with the average.
  void hold_hooks();
  void release_hooks() noexcept;
  /// Gradients of backwards without synchronisation wait here.
  bool has_waiting_gradients() const;
  void start_reduction();
  bool is_reducing() const;
  /// How a reduction ended.
  struct Reduction {
    /// By position: this rank had a gradient. Where it had none and the leaf
    /// had none before either, zeros stand in until drop_unused_gradients().
    std::vector<bool> used;
    std::exception_ptr failure; // of a user's hook
  };
  /// Waits for the reduction and adds the result to the leaves' gradients.
  Reduction finish_reduction();
  /// Makes gradients undefined again that no rank had, since zeros would make
  /// optimizers act.
  void drop_unused_gradients(const std::vector<bool>& used_by_any);
  /// Waits for the reduction and returns the result, by position.
  std::vector<at::Tensor> finish_reduction_apart();
  void drop_reduction() noexcept;

  /// True where faces show the shard itself and nothing is ever moved.
  bool shows_shard() const;
  /// Bytes of the full buffers while they have memory of their own.
  size_t full_bytes() const;
  /// Elements of full buffers that have memory now, padding included.
  int64_t allocated_numel() const;
  size_t shard_bytes() const;
  /// Bytes of the full gradients as they are averaged, padding included.
  size_t gradient_bytes() const;
  /// See Bundle.
  size_t full_bytes_now() const;
  size_t gradient_bytes_now() const;

 private:
  struct Param;
  struct Summoning;

  void make_bundles(const std::vector<NamedParam>& params, BufferPool& pool);
  void make_faces(const std::vector<NamedParam>& params);
  void make_leaves();
  at::Tensor face_alias(const Param& param) const;
  void set_trainable(Param& param, bool on);
  void refuse_partial_freeze(const Param& param) const;
  NodePtr node();
  bool exposes_shard() const;
  void show_summoned(
      Param& param,
      const at::Tensor& full,
      const at::Tensor& grad);
  std::vector<at::Tensor> gather_gradients();
  struct Average {
    std::vector<at::Tensor> gradients; // by position
    std::vector<bool> used; // by position: this rank had one
  };
  Average wait_for_reduction();
  std::optional<std::string> objection_to_faces() const;
  bool was_written() const;
  void write_back();
  void write_back_gradients();
  void hide_summoned();
  [[noreturn]] void fail(
      const char* call,
      const std::string& parameter,
      const std::string& what) const;

  std::string name_;
  const int number_;
  std::string label_; // of collectives: name and number
  std::string raw_access_error_;
  const Groups groups_;
  const UnitOptions options_;
  const std::shared_ptr<Schedule> schedule_;
  const void* home_ = nullptr;
  std::weak_ptr<const void> home_alive_;
  bool is_home_tracked_ = false;
  std::shared_ptr<Unit> parent_;
  std::any attachment_;
  std::vector<Param> params_;
  std::vector<Bundle> bundles_;
  WeakNodePtr node_; // owned by the faces' gradient edges
  UnitState state_ = UnitState::Sharded;
  std::unique_ptr<Summoning> summoned_; // while Summoned
  std::mutex write_mutex_; // guards what is done before a write
  std::optional<UnitStart> start_;
  std::atomic<int64_t> writes_ = 0; // a root's: of all units below it too
  int64_t gathered_at_ = -1; // num_writes() then
  bool is_pinned_ = false;
  bool syncs_gradients_ = true;
  bool all_reduces_ = true;
  std::vector<bool> zeros_stand_in_; // by position, see finish_reduction()
};

/// The unit of a face, or nullptr for a tensor that is no face. Finds the unit
/// of a Summoned face too.
Unit* unit_of(const at::Tensor& tensor);

/// A face or a leaf: what a rank has of it may be a part, all or nothing.
bool is_sharded(const at::Tensor& tensor);

} // namespace tessera::engine
