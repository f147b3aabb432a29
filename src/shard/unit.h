// Parameters that are gathered and freed together.
#pragma once

#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shard/layout.h"

namespace tessera::shard {

class GatherNode;
class Schedule;

enum class UnitState {
  /// Faces have no bytes; a touch gathers. Memory: the shard. Next: Gathering.
  Sharded,
  /// A gather is in flight; a touch waits for it. Memory: shard and full
  /// buffer. Next: Full.
  Gathering,
  /// Faces show the full parameters. Memory: shard and full buffer. Next:
  /// Sharded.
  Full,
};

struct UnitOptions {
  Layout::Kind layout = Layout::Kind::Flat;
  bool reshard_after_forward = true;
  /// dtype of the full parameters; shards keep theirs.
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  /// dtype gradients are reduced in; default: the shard's.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
};

/// A parameter as the module registered it.
struct NamedParam {
  std::string name; // below the unit's module
  at::Tensor tensor;
};

/// [Note: storage identity]
///
/// A unit's full parameters live in flat buffers, one for each dtype. The
/// tensors that the module holds become *faces*: views of such a buffer at
/// fixed offsets. The buffer's StorageImpl never changes, only its bytes come
/// and go: resharding takes them away, gathering puts others in their place.
/// So whatever points to the storage stays valid: the faces, views of them that
/// a forward made, tensors that autograd saved for backward. A gather writes
/// through an alias that autograd knows nothing of, so that version counters do
/// not move while the values are the same.
///
/// While it has no bytes the storage throws on raw access (LibTorch 2.13 on);
/// operators do not get that far, see [Note: first touch].
///
/// A shard, on the other hand, is an ordinary tensor with a leaf for each
/// parameter that views this rank's part of it. Leaves are what optimizers get.
/// They carry the key of faces too, so that writes to them are seen: fused
/// optimizers do not bump version counters.
///
/// Faces own their unit (through a hook of their autograd metadata that never
/// runs); the unit knows its faces only weakly. It dies with the module.
class Unit : public std::enable_shared_from_this<Unit> {
 public:
  /// Shards `params`, which must be leaves of their module and not sharded yet.
  static std::shared_ptr<Unit> create(
      std::string name,
      const std::vector<NamedParam>& params,
      const Group& group,
      const UnitOptions& options,
      std::shared_ptr<Schedule> schedule);
  ~Unit();
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  const std::string& name() const {
    return name_;
  }
  void set_name(std::string name) {
    name_ = std::move(name);
  }
  const Group& group() const {
    return group_;
  }
  const UnitOptions& options() const {
    return options_;
  }
  UnitState state() const {
    return state_;
  }
  Schedule& schedule() const {
    return *schedule_;
  }

  /// The module that was sharded, to be recognized by; never followed.
  const void* home() const {
    return home_;
  }
  void set_home(const void* module) {
    home_ = module;
  }
  /// The unit whose module contains this one's, if any.
  const std::shared_ptr<Unit>& parent() const {
    return parent_;
  }
  void set_parent(std::shared_ptr<Unit> parent) {
    parent_ = std::move(parent);
  }
  bool is_root() const {
    return parent_ == nullptr;
  }
  bool contains(const Unit& other) const;

  /// Off: gradients of a backward wait here for the next one that has it on.
  void set_syncs_gradients(bool on) {
    syncs_gradients_ = on;
  }

  /// The leaf of the parameter whose face has this TensorImpl.
  at::Tensor leaf_of(const c10::TensorImpl* face) const;
  /// All leaves, in the order of the parameters.
  std::vector<at::Tensor> leaves() const;

  /// True if the shards were written since they were gathered last.
  bool is_stale() const;
  void count_write(const c10::StorageImpl* shard);

  /// Throws if something replaced the data of a face behind the unit's back.
  void check_faces(const char* call) const;

  void start_gather();
  void finish_gather();
  void reshard();

  /// Takes the gradients of all faces, by position; called by the node.
  void take_gradients(std::vector<at::Tensor>&& gradients);
  /// Waits for the reduction and adds the result to the leaves' gradients.
  void finish_reduction();
  void drop_reduction();

  /// Bytes of full buffers that are allocated now.
  size_t full_bytes() const;
  size_t shard_bytes() const;

 private:
  struct Param;
  struct Bundle;
  friend class GatherNode;

  Unit(
      std::string name,
      const Group& group,
      const UnitOptions& options,
      std::shared_ptr<Schedule> schedule);
  void make_bundles(const std::vector<NamedParam>& params);
  void make_faces();
  [[noreturn]] void fail(
      const char* call,
      const std::string& parameter,
      const std::string& what) const;
  void copy_in(Bundle& bundle, std::vector<at::Tensor>& gradients);
  void zero_gradient_of(
      const Bundle& bundle,
      const at::Tensor& buffer,
      size_t index) const;

  std::string name_;
  const Group group_;
  const UnitOptions options_;
  const std::shared_ptr<Schedule> schedule_;
  const void* home_ = nullptr;
  std::shared_ptr<Unit> parent_;
  std::vector<Param> params_;
  std::vector<Bundle> bundles_;
  GatherNode* node_ = nullptr; // owned by the faces' gradient edges
  torch::autograd::Edge node_edge_; // keeps it where no face requires grad
  UnitState state_ = UnitState::Sharded;
  bool syncs_gradients_ = true;
};

/// The unit that a storage belongs to, as full buffer or as shard.
struct StorageOwner {
  Unit* unit = nullptr;
  bool is_shard = false;
};
StorageOwner find_owner(const c10::StorageImpl* storage);

/// The unit of a face, or nullptr for a tensor that is no face.
Unit* unit_of(const at::Tensor& tensor);

} // namespace tessera::shard
