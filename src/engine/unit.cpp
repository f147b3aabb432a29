#include "engine/unit.h"

#include <tessera/error.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

#include "deferred/deferred_init.h"
#include "engine/boxes.h"
#include "engine/face_meta.h"
#include "engine/first_touch.h"
#include "engine/gather_node.h"
#include "engine/owners.h"
#include "engine/start.h"
#include "engine/unit_parts.h"
#include "libtorch/alias.h"
#include "libtorch/autograd_compat.h"
#include "libtorch/pickling.h"

namespace tessera::engine {

namespace autograd = torch::autograd;

Unit* unit_of(const at::Tensor& tensor) {
  if (!tensor.defined() ||
      autograd::impl::get_autograd_meta(tensor) == nullptr) {
    return nullptr;
  }
  if (auto* node = dynamic_cast<GatherNode*>(tensor.grad_fn().get())) {
    return &node->unit();
  }
  for (const auto& hook : autograd::impl::hooks(tensor)) {
    if (auto* keep = dynamic_cast<KeepAlive*>(hook.get())) {
      return keep->unit.get();
    }
  }
  return nullptr;
}

bool is_sharded(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has(kShardKey) ||
      unit_of(tensor) != nullptr;
}

namespace {

void refuse_to_pickle_sharded(const at::Tensor& tensor) {
  const Unit* unit = unit_of(tensor);
  if (unit != nullptr && tensor.numel() != 0 &&
      storage_of(tensor)->nbytes() == 0) {
    raise(
        {.call = "torch::save", .unit = unit->name()},
        "raw access to a sharded parameter, which has no memory of its own now. Save inside tessera::summon_full_params(module), or take tessera::state_dict(module).");
  }
}

} // namespace

Unit::Unit(
    std::string name,
    int number,
    const Groups& groups,
    const UnitOptions& options,
    std::shared_ptr<Schedule> schedule)
    : number_(number),
      groups_(groups),
      options_(options),
      schedule_(std::move(schedule)),
      node_(no_node()) {
  set_name(std::move(name));
  if (options_.compare_start && !options_.sync_from_rank0 &&
      groups_.all.size() > 1) {
    start_.emplace();
  }
}

void Unit::shard(const std::vector<NamedParam>& params, BufferPool& pool) {
  enable_first_touch();
  check_before_pickling(refuse_to_pickle_sharded);
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  make_bundles(params, pool);
  make_leaves();
  make_faces(params);
}

Unit::~Unit() {
  for (Bundle& bundle : bundles_) {
    forget_owner(bundle.storage());
    forget_owner(storage_of(bundle.shard()));
    bundle.settle(); // it writes into memory that goes now
    if (bundle.shows_shard()) {
      bundle.free_full(raw_access_error_); // a view must not outlive the shard
    }
  }
}

void Unit::set_name(std::string name) {
  name_ = std::move(name);
  label_ = name_ + "#" + std::to_string(number_);
  raw_access_error_ = format_error(
      {.call = "data_ptr", .unit = name_},
      "raw access to a sharded parameter, which has no memory of its own now. Use operators, which gather it, or do this inside tessera::summon_full_params(module), torch::save too.");
}

bool Unit::contains(const Unit& other) const {
  for (const Unit* up = other.parent_.get(); up != nullptr;
       up = up->parent_.get()) {
    if (up == this) {
      return true;
    }
  }
  return false;
}

Unit& Unit::root() {
  Unit* up = this;
  while (up->parent_) {
    up = up->parent_.get();
  }
  return *up;
}

const Unit& Unit::root() const {
  return const_cast<Unit*>(this)->root();
}

void Unit::fail(
    const char* call,
    const std::string& parameter,
    const std::string& what) const {
  raise(
      {.call = call,
       .rank =
           groups_.all.global_ranks()[static_cast<size_t>(groups_.all.rank())],
       .unit = name_,
       .parameter = parameter},
      what);
}

/// Sorts the parameters by dtype and cuts this rank's shards out of them.
void Unit::make_bundles(
    const std::vector<NamedParam>& params,
    BufferPool& pool) {
  std::vector<at::ScalarType> dtypes;
  std::vector<std::vector<size_t>> members;
  for (const NamedParam& param : params) {
    const at::Tensor& tensor = param.tensor;
    const auto dtype = tensor.scalar_type();
    auto found = std::find(dtypes.begin(), dtypes.end(), dtype);
    if (found == dtypes.end()) {
      found = dtypes.insert(dtypes.end(), dtype);
      members.emplace_back();
    }
    const auto bundle = static_cast<size_t>(found - dtypes.begin());
    params_.push_back(
        {.name = param.name,
         .face = WeakFace(tensor.getIntrusivePtr()),
         .face_id = tensor.unsafeGetTensorImpl(),
         .trainable = tensor.requires_grad(),
         .bundle = bundle,
         .index = members[bundle].size()});
    members[bundle].push_back(params_.size() - 1);
  }
  bundles_.reserve(members.size()); // owners and faces know their storages
  for (const auto& positions : members) {
    std::vector<Shape> shapes;
    for (size_t position : positions) {
      shapes.push_back(params[position].tensor.sizes().vec());
    }
    const at::Tensor& first = params[positions.front()].tensor;
    Layout::Alignment alignment = options_.alignment;
    if (options_.param_alignment_bytes > 0) {
      alignment.param = options_.param_alignment_bytes /
          static_cast<int64_t>(c10::elementSize(
              options_.param_dtype.value_or(first.scalar_type())));
    }
    Layout layout(
        options_.layout, std::move(shapes), groups_.shard.size(), alignment);
    const at::Device device =
        is_deferred(first) ? intended_device(first) : first.device();
    auto options = at::TensorOptions(device).dtype(first.scalar_type());
    if (options_.offload) {
      options = options.device(at::kCPU).pinned_memory(device.is_cuda());
    }
    const at::Tensor shard = at::zeros({layout.shard_numel()}, options);
    for (size_t index = 0; index < positions.size(); ++index) {
      const Run run = layout.run(index, groups_.shard.rank());
      const NamedParam& param = params[positions[index]];
      at::Tensor whole = is_deferred(param.tensor) ? replay(param.tensor)
                                                   : param.tensor.detach();
      if (options_.sync_from_rank0) {
        whole = whole.contiguous();
        groups_.all.broadcast(whole, 0, param.name);
      }
      if (start_) {
        start_->names.push_back(param.name);
        start_->digests.push_back(digest_of(whole));
      }
      shard.narrow(0, run.shard_begin, run.numel)
          .copy_(whole.reshape({-1}).narrow(0, run.param_begin, run.numel));
    }
    bundles_.emplace_back(
        std::move(layout), shard, device, groups_, options_, pool);
    set_owner(bundles_.back().storage(), {this, false});
    set_owner(storage_of(shard), {this, true});
  }
}

void Unit::make_leaves() {
  for (Param& param : params_) {
    const Bundle& bundle = bundles_[param.bundle];
    if (options_.one_leaf) {
      param.leaf = &param == params_.data()
          ? alias_of(bundle.shard(), bundle.shard().sizes(), 0, kShardKeys)
          : params_.front().leaf;
    } else {
      const Layout& layout = bundle.layout();
      const int rank = groups_.shard.rank();
      param.leaf = alias_of(
          bundle.shard(),
          layout.local_shape(param.index, rank),
          layout.run(param.index, rank).shard_begin,
          kShardKeys);
    }
    param.leaf.set_requires_grad(param.trainable);
  }
}

/// What the parameter's face shows outside of summoning.
at::Tensor Unit::face_alias(const Param& param) const {
  const Bundle& bundle = bundles_[param.bundle];
  return alias_of(
      bundle.full(),
      bundle.layout().shape(param.index),
      bundle.layout().full_offset(param.index),
      kShardKeys);
}

/// The node behind the faces; made anew if all of them were frozen.
NodePtr Unit::node() {
  if (NodePtr node = node_.lock()) {
    return node;
  }
  auto node = make_node<GatherNode>(shared_from_this());
  // Next edges to the leaves, so that grad(loss, leaves) finds them: to frozen
  // ones too, since edges cannot be added once a graph hangs on the node.
  for (Param& param : params_) {
    const bool requires_grad = param.leaf.requires_grad();
    param.leaf.set_requires_grad(true);
    node->add_next_edge(autograd::impl::gradient_edge(param.leaf));
    param.leaf.set_requires_grad(requires_grad);
    node->add_input_metadata(face_alias(param));
  }
  node_ = WeakNodePtr(NodePtr(node));
  return node;
}

/// Turns the module's parameters into faces.
void Unit::make_faces(const std::vector<NamedParam>& params) {
  for (size_t position = 0; position < params_.size(); ++position) {
    const at::Tensor& face = params[position].tensor;
    show(face, face_alias(params_[position]));
    face.unsafeGetTensorImpl()->set_autograd_meta(std::make_unique<FaceMeta>(
        params_[position].name, params_[position].leaf));
    set_trainable(params_[position], params_[position].trainable);
  }
  for (Bundle& bundle : bundles_) {
    bundle.free_full(raw_access_error_);
  }
}

at::Tensor Unit::leaf_of(const c10::TensorImpl* face) const {
  for (const Param& param : params_) {
    if (param.face_id == face) {
      return param.leaf;
    }
  }
  return {};
}

Unit::Place Unit::place_of(const c10::TensorImpl* face) const {
  const auto param =
      std::find_if(params_.begin(), params_.end(), [&](const Param& one) {
        return one.face_id == face;
      });
  TESSERA_INTERNAL_ASSERT(param != params_.end(), "not a face of this unit");
  return {param->bundle, param->index};
}

std::optional<Unit::LeafParam> Unit::find_leaf(
    const c10::TensorImpl* leaf) const {
  const auto param =
      std::find_if(params_.begin(), params_.end(), [&](const Param& one) {
        return one.leaf.unsafeGetTensorImpl() == leaf;
      });
  if (param == params_.end() || options_.one_leaf) {
    return std::nullopt;
  }
  const Layout& layout = bundles_[param->bundle].layout();
  const Shape& shape = layout.shape(param->index);
  const Run run = layout.run(param->index, groups_.shard.rank());
  return LeafParam{
      is_root() ? param->name : name_ + "." + param->name,
      shape,
      boxes_of(shape, run.param_begin, run.numel)};
}

ShardedTensor Unit::sharded(const c10::TensorImpl* face) const {
  const Place place = place_of(face);
  const Bundle& bundle = bundles_[place.bundle];
  const Shape& shape = bundle.layout().shape(place.index);
  const Run run = bundle.layout().run(place.index, groups_.shard.rank());
  std::vector<ShardedTensor::Piece> pieces;
  int64_t begin = run.shard_begin;
  for (Box& box : boxes_of(shape, run.param_begin, run.numel)) {
    const at::Tensor part =
        alias_of(bundle.shard(), box.sizes, begin, kShardKeys);
    begin += box.numel();
    pieces.push_back({std::move(box), part});
  }
  return {
      shape,
      bundle.shard().scalar_type(),
      std::move(pieces),
      groups_.shard,
      alias_of(bundle.shard(), {run.numel}, run.shard_begin, kShardKeys)};
}

std::vector<at::Tensor> Unit::leaves() const {
  std::vector<at::Tensor> result;
  for (const Param& param : params_) {
    result.push_back(param.leaf);
    if (options_.one_leaf) {
      break;
    }
  }
  return result;
}

bool Unit::shows_summoned() const {
  return summoned_ != nullptr && summoned_->shown;
}

at::Tensor Unit::flat_param() const {
  if (bundles_.size() != 1) {
    fail(
        "flat_param",
        "",
        bundles_.empty() ? "this unit has no parameters."
                         : "this unit has parameters of several dtypes.");
  }
  const Bundle& bundle = bundles_.front();
  if (shows_summoned()) {
    const Layout& layout = bundle.layout();
    return summoned_->full.front().narrow(
        0,
        0,
        options_.one_leaf ? layout.unpadded_numel() : layout.full_numel());
  }
  return options_.one_leaf ? params_.front().leaf : bundle.shard();
}

/// A trainable face has a gradient edge. Its flag, which means nothing beside
/// one, is set too: so a user who clears it is noticed. A frozen one has
/// neither.
void Unit::set_trainable(Param& param, bool on) {
  param.trainable = on;
  param.leaf.set_requires_grad(on);
  if (!on) {
    param.leaf.mutable_grad().reset();
  }
  const at::Tensor face = param.lock();
  if (!face.defined()) {
    return;
  }
  const auto alive = shared_from_this(); // while the owner changes
  auto& meta = meta_of(face);
  meta.requires_grad_ = on;
  if (state_ == UnitState::Summoned) {
    return; // a leaf meanwhile; hide_summoned() does the rest
  }
  if (on) {
    meta.grad_fn_ = node();
    meta.output_nr_ = static_cast<uint32_t>(&param - params_.data());
  } else {
    meta.grad_fn_ = NodePtr();
    meta.output_nr_ = 0;
    autograd::impl::clear_hooks(face);
    autograd::impl::add_hook(face, std::make_unique<KeepAlive>(alive));
  }
}

void Unit::refuse_partial_freeze(const Param& param) const {
  if (options_.one_leaf && params_.size() > 1) {
    fail(
        "set_requires_grad",
        param.name,
        "without use_orig_params the unit has one flat parameter, which trains as a whole. Use use_orig_params(true).");
  }
}

void Unit::set_requires_grad(const c10::TensorImpl* face, bool on) {
  if (state_ == UnitState::Summoned) {
    fail(
        "set_requires_grad",
        "",
        "parameters are summoned. Close the guard first.");
  }
  for (Param& param : params_) {
    if (param.face_id == face) {
      refuse_partial_freeze(param);
      set_trainable(param, on);
    }
  }
}

/// Users also freeze through what they hold: the module's parameter, or the
/// leaf. Whichever differs from what was so far is what they want.
void Unit::follow_requires_grad() {
  for (Param& param : params_) {
    const bool by_leaf = param.leaf.requires_grad();
    const auto face = param.face.lock();
    auto* meta = face
        ? static_cast<autograd::AutogradMeta*>(face->autograd_meta())
        : nullptr;
    const bool by_face =
        meta == nullptr ? param.trainable : meta->requires_grad_;
    if (by_face != param.trainable && by_leaf == param.trainable &&
        options_.one_leaf) {
      meta->requires_grad_ = param.trainable; // as it was
      refuse_partial_freeze(param);
    }
    if (by_leaf != param.trainable || by_face != param.trainable) {
      set_trainable(param, !param.trainable);
    }
  }
}

bool Unit::exposes_shard() const {
  return groups_.shard.size() == 1 && !options_.offload;
}

void Unit::count_write() {
  if (state_ == UnitState::Summoned && summoned_->options.writeback &&
      !exposes_shard()) {
    fail(
        "write",
        "",
        "this writes to a shard inside summon_full_params, which would write its own values back over it. Close the guard first.");
  }
  {
    const std::scoped_lock lock(write_mutex_);
    if (start_) {
      start_->was_written = true;
    }
    for (Bundle& bundle : bundles_) {
      bundle.before_write();
    }
  }
  ++root().writes_;
}

/// Module::to(), set_data() and torch::load() replace what is under a parameter
/// without an operator that could be seen.
void Unit::check_faces(const char* call) const {
  if (state_ == UnitState::Summoned) {
    return;
  }
  for (const Param& param : params_) {
    const auto face = param.face.lock();
    if (face &&
        face->unsafe_storage().unsafeGetStorageImpl() !=
            bundles_[param.bundle].storage()) {
      fail(
          call,
          param.name,
          "something replaced this parameter's data after it was sharded (Module::to, set_data or torch::load). Do that before fully_shard.");
    }
  }
}

bool Unit::start_gather() {
  if (state_ != UnitState::Sharded) {
    return false;
  }
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  check_faces("gather");
  follow_requires_grad();
  const bool changed = is_stale();
  try {
    for (Bundle& bundle : bundles_) {
      bundle.start_gather(label_);
    }
  } catch (...) { // not gathering: nobody may take this for a gather
    for (Bundle& bundle : bundles_) {
      bundle.settle();
      bundle.free_full(raw_access_error_);
    }
    throw;
  }
  state_ = UnitState::Gathering;
  gathered_at_ = num_writes();
  if (changed) {
    // A graph of the old values must not run backward with the new ones.
    for (const Param& param : params_) {
      if (const auto face = param.face.lock()) {
        face->bump_version();
      }
    }
  }
  return true;
}

void Unit::finish_gather() {
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  state_ = UnitState::Full;
  try {
    for (Bundle& bundle : bundles_) {
      bundle.finish_gather();
    }
  } catch (...) {
    for (Bundle& bundle : bundles_) {
      bundle.settle();
    }
    throw;
  }
}

bool Unit::reshard() {
  if (state_ != UnitState::Full) {
    return false;
  }
  state_ = UnitState::Sharded;
  is_pinned_ = false;
  for (Bundle& bundle : bundles_) {
    bundle.free_full(raw_access_error_);
  }
  return true;
}

bool Unit::shows_shard() const {
  return std::all_of(
      bundles_.begin(), bundles_.end(), [](const Bundle& bundle) {
        return bundle.shows_shard();
      });
}

size_t Unit::full_bytes() const {
  size_t bytes = 0;
  for (const Bundle& bundle : bundles_) {
    if (!bundle.shows_shard()) {
      bytes += static_cast<size_t>(bundle.full().numel()) *
          bundle.full().element_size();
    }
  }
  return bytes;
}

int64_t Unit::allocated_numel() const {
  int64_t numel = 0;
  for (const Bundle& bundle : bundles_) {
    numel += static_cast<int64_t>(
        bundle.storage()->nbytes() / bundle.full().element_size());
  }
  return numel;
}

size_t Unit::shard_bytes() const {
  size_t bytes = 0;
  for (const Bundle& bundle : bundles_) {
    bytes += bundle.shard().nbytes();
  }
  return bytes;
}

size_t Unit::gradient_bytes() const {
  size_t bytes = 0;
  for (const Bundle& bundle : bundles_) {
    bytes += static_cast<size_t>(
                 bundle.layout().num_ranks() * bundle.layout().shard_numel()) *
        c10::elementSize(bundle.reduce_dtype());
  }
  return bytes;
}

size_t Unit::full_bytes_now() const {
  size_t bytes = 0;
  for (const Bundle& bundle : bundles_) {
    bytes += bundle.full_bytes_now();
  }
  return bytes;
}

size_t Unit::gradient_bytes_now() const {
  size_t bytes = 0;
  for (const Bundle& bundle : bundles_) {
    bytes += bundle.gradient_bytes_now();
  }
  return bytes;
}

} // namespace tessera::engine
