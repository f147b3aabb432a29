#include "engine/unit_params.h"

#include <tessera/error.h>

#include <algorithm>
#include <utility>

#include "engine/boxes.h"
#include "engine/face_meta.h"
#include "engine/first_touch.h"
#include "engine/gather_node.h"
#include "engine/keep_alive.h"
#include "engine/owners.h"
#include "engine/unit.h"
#include "libtorch/alias.h"
#include "libtorch/backward_stream.h"

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

UnitParams::UnitParams(Unit& unit) : unit_(unit), node_(libtorch::no_node()) {}

void UnitParams::add(const NamedParam& param, Place place) {
  params_.push_back(
      {.name = param.name,
       .face = UnitParam::WeakFace(param.tensor.getIntrusivePtr()),
       .face_id = param.tensor.unsafeGetTensorImpl(),
       .trainable = param.tensor.requires_grad(),
       .bundle = place.bundle,
       .index = place.index});
}

/// The leaves first: the metadata of faces holds them.
void UnitParams::shard(const std::vector<NamedParam>& params) {
  make_leaves();
  make_faces(params);
}

void UnitParams::make_leaves() {
  for (UnitParam& param : params_) {
    const Bundle& bundle = unit_.bundles()[param.bundle];
    if (unit_.options().one_leaf) {
      param.leaf = &param == params_.data()
          ? libtorch::alias_of(
                bundle.shard(), bundle.shard().sizes(), 0, kShardKeys)
          : params_.front().leaf;
    } else {
      const Layout& layout = bundle.layout();
      const int rank = unit_.groups().shard.rank();
      param.leaf = libtorch::alias_of(
          bundle.shard(),
          layout.local_shape(param.index, rank),
          layout.run(param.index, rank).shard_begin,
          kShardKeys);
    }
    param.leaf.set_requires_grad(param.trainable);
  }
}

at::Tensor UnitParams::face_alias(const UnitParam& param) const {
  const Bundle& bundle = unit_.bundles()[param.bundle];
  return libtorch::alias_of(
      bundle.full(),
      bundle.layout().shape(param.index),
      bundle.layout().full_offset(param.index),
      kShardKeys);
}

/// The node behind the faces; made anew if all of them were frozen.
libtorch::NodePtr UnitParams::node() {
  if (libtorch::NodePtr node = node_.lock()) {
    return node;
  }
  auto node = libtorch::make_node<GatherNode>(unit_.shared_from_this());
  // Next edges to the leaves, so that grad(loss, leaves) finds them: to frozen
  // ones too, since edges cannot be added once a graph hangs on the node.
  for (UnitParam& param : params_) {
    const bool requires_grad = param.leaf.requires_grad();
    param.leaf.set_requires_grad(true);
    node->add_next_edge(autograd::impl::gradient_edge(param.leaf));
    param.leaf.set_requires_grad(requires_grad);
    node->add_input_metadata(face_alias(param));
  }
  node_ = libtorch::WeakNodePtr(libtorch::NodePtr(node));
  return node;
}

/// Turns the module's parameters into faces.
void UnitParams::make_faces(const std::vector<NamedParam>& params) {
  for (size_t position = 0; position < params_.size(); ++position) {
    const at::Tensor& face = params[position].tensor;
    libtorch::show(face, face_alias(params_[position]));
    face.unsafeGetTensorImpl()->set_autograd_meta(std::make_unique<FaceMeta>(
        params_[position].name, params_[position].leaf));
    set_trainable(params_[position], params_[position].trainable);
  }
}

at::Tensor UnitParams::leaf_of(const c10::TensorImpl* face) const {
  for (const UnitParam& param : params_) {
    if (param.face_id == face) {
      return param.leaf;
    }
  }
  return {};
}

UnitParams::Place UnitParams::place_of(const c10::TensorImpl* face) const {
  const auto param =
      std::find_if(params_.begin(), params_.end(), [&](const UnitParam& one) {
        return one.face_id == face;
      });
  TESSERA_INTERNAL_ASSERT(param != params_.end(), "not a face of this unit");
  return {param->bundle, param->index};
}

std::optional<UnitParams::LeafParam> UnitParams::find_leaf(
    const c10::TensorImpl* leaf) const {
  const auto param =
      std::find_if(params_.begin(), params_.end(), [&](const UnitParam& one) {
        return one.leaf.unsafeGetTensorImpl() == leaf;
      });
  if (param == params_.end() || unit_.options().one_leaf) {
    return std::nullopt;
  }
  const Layout& layout = unit_.bundles()[param->bundle].layout();
  const Shape& shape = layout.shape(param->index);
  const Run run = layout.run(param->index, unit_.groups().shard.rank());
  return LeafParam{
      unit_.is_root() ? param->name : unit_.name() + "." + param->name,
      shape,
      boxes_of(shape, run.param_begin, run.numel)};
}

ShardedTensor UnitParams::sharded(const c10::TensorImpl* face) const {
  const Place place = place_of(face);
  const Bundle& bundle = unit_.bundles()[place.bundle];
  const Shape& shape = bundle.layout().shape(place.index);
  const Run run = bundle.layout().run(place.index, unit_.groups().shard.rank());
  std::vector<ShardedTensor::Piece> pieces;
  int64_t begin = run.shard_begin;
  for (TensorBox& box : boxes_of(shape, run.param_begin, run.numel)) {
    const at::Tensor part =
        libtorch::alias_of(bundle.shard(), box.sizes, begin, kShardKeys);
    begin += box.numel();
    pieces.push_back({std::move(box), part});
  }
  return {
      shape,
      bundle.shard().scalar_type(),
      std::move(pieces),
      unit_.groups().shard,
      libtorch::alias_of(
          bundle.shard(), {run.numel}, run.shard_begin, kShardKeys)};
}

std::vector<at::Tensor> UnitParams::leaves() const {
  std::vector<at::Tensor> result;
  for (const UnitParam& param : params_) {
    result.push_back(param.leaf);
    if (unit_.options().one_leaf) {
      break;
    }
  }
  return result;
}

/// A trainable face has a gradient edge. Its flag, which means nothing beside
/// one, is set too: so a user who clears it is noticed. A frozen one has
/// neither.
void UnitParams::set_trainable(UnitParam& param, bool on) {
  param.trainable = on;
  param.leaf.set_requires_grad(on);
  if (!on) {
    param.leaf.mutable_grad().reset();
  }
  const at::Tensor face = param.lock();
  if (!face.defined()) {
    return;
  }
  const auto alive = unit_.shared_from_this(); // while the owner changes
  auto& meta = meta_of(face);
  meta.requires_grad_ = on;
  if (unit_.state() == UnitState::Summoned) {
    return; // a leaf meanwhile; UnitSummon::hide() does the rest
  }
  if (on) {
    meta.grad_fn_ = node();
    meta.output_nr_ = static_cast<uint32_t>(&param - params_.data());
  } else {
    meta.grad_fn_ = libtorch::NodePtr();
    meta.output_nr_ = 0;
    autograd::impl::clear_hooks(face);
    autograd::impl::add_hook(face, std::make_unique<KeepAlive>(alive));
  }
}

void UnitParams::refuse_partial_freeze(const UnitParam& param) const {
  if (unit_.options().one_leaf && params_.size() > 1) {
    unit_.fail(
        "set_requires_grad",
        param.name,
        "without use_orig_params the unit has one flat parameter, which trains as a whole. Use use_orig_params(true).");
  }
}

void UnitParams::set_requires_grad(const c10::TensorImpl* face, bool on) {
  if (unit_.state() == UnitState::Summoned) {
    unit_.fail(
        "set_requires_grad",
        "",
        "parameters are summoned. Close the guard first.");
  }
  for (UnitParam& param : params_) {
    if (param.face_id == face) {
      refuse_partial_freeze(param);
      set_trainable(param, on);
    }
  }
}

/// Users also freeze through what they hold: the module's parameter, or the
/// leaf. Whichever differs from what was so far is what they want.
void UnitParams::follow_requires_grad() {
  for (UnitParam& param : params_) {
    const bool by_leaf = param.leaf.requires_grad();
    const auto face = param.face.lock();
    auto* meta = face
        ? static_cast<autograd::AutogradMeta*>(face->autograd_meta())
        : nullptr;
    const bool by_face =
        meta == nullptr ? param.trainable : meta->requires_grad_;
    if (by_face != param.trainable && by_leaf == param.trainable &&
        unit_.options().one_leaf) {
      meta->requires_grad_ = param.trainable; // as it was
      refuse_partial_freeze(param);
    }
    if (by_leaf != param.trainable || by_face != param.trainable) {
      set_trainable(param, !param.trainable);
    }
  }
}

/// Module::to(), set_data() and torch::load() replace what is under a parameter
/// without an operator that could be seen.
void UnitParams::check_faces(const char* call) const {
  if (unit_.state() == UnitState::Summoned) {
    return;
  }
  for (const UnitParam& param : params_) {
    const auto face = param.face.lock();
    if (face &&
        face->unsafe_storage().unsafeGetStorageImpl() !=
            unit_.bundles()[param.bundle].storage()) {
      unit_.fail(
          call,
          param.name,
          "something replaced this parameter's data after it was sharded (Module::to, set_data or torch::load). Do that before fully_shard.");
    }
  }
}

void UnitParams::run_backward_on_current_stream() {
  const libtorch::NodePtr node = find_node();
  if (!node) {
    return; // all are frozen
  }
  node->clear_input_metadata();
  for (size_t position = 0; position < params_.size(); ++position) {
    const UnitParam& param = params_[position];
    node->add_input_metadata(face_alias(param));
    libtorch::use_current_stream(
        *node->next_edge(position).function, param.leaf);
  }
}

void UnitParams::bump_versions() {
  for (const UnitParam& param : params_) {
    if (const auto face = param.face.lock()) {
      face->bump_version();
    }
  }
}

} // namespace tessera::engine
