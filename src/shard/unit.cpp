#include "shard/unit.h"

#include <tessera/error.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>
#include <sstream>
#include <utility>

#include "shard/alias.h"
#include "shard/autograd_compat.h"
#include "shard/boxes.h"
#include "shard/deferred_init.h"
#include "shard/first_touch.h"
#include "shard/gather_node.h"
#include "shard/schedule.h"

namespace tessera::shard {
namespace {

namespace autograd = torch::autograd;

using WeakImpl =
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// Keeps a unit alive from the autograd metadata of a face that has no gradient
/// edge to do so: a frozen or summoned one. Registering a hook clears this, but
/// is refused for the one, and the guard keeps the unit of the other.
struct KeepAlive : autograd::FunctionPreHook {
  explicit KeepAlive(std::shared_ptr<Unit> owned) : unit(std::move(owned)) {}
  autograd::variable_list operator()(
      const autograd::variable_list& gradients) override {
    return gradients;
  }
  std::shared_ptr<Unit> unit;
};

autograd::AutogradMeta& meta_of(const at::Tensor& face) {
  return *autograd::impl::materialize_autograd_meta(face);
}

} // namespace

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

/// One parameter of the unit. Its position in params_ is its input number in
/// the node.
struct Unit::Param {
  std::string name;
  WeakImpl face;
  const c10::TensorImpl* face_id = nullptr;
  bool trainable = false;
  size_t bundle = 0;
  size_t index = 0; // in the bundle's layout
  at::Tensor leaf; // shared by all where there is one leaf

  /// The module may have dropped it.
  at::Tensor lock() const {
    auto impl = face.lock();
    return impl ? at::Tensor(std::move(impl)) : at::Tensor();
  }
};

struct Unit::Summoning {
  NodePtr node; // no face owns it meanwhile
  SummonOptions options;
  UnitState before = UnitState::Sharded;
  bool shown = false; // on this rank
  std::vector<at::Tensor> full; // by bundle: a copy, or the shard
  std::vector<uint32_t> versions; // of the faces, by position
};

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
  schedule_->add(*this);
}

std::shared_ptr<Unit> Unit::create(
    std::string name,
    int number,
    const std::vector<NamedParam>& params,
    const Groups& groups,
    const UnitOptions& options,
    std::shared_ptr<Schedule> schedule) {
  enable_first_touch();
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  std::shared_ptr<Unit> unit(
      new Unit(std::move(name), number, groups, options, std::move(schedule)));
  unit->make_bundles(params);
  unit->make_leaves();
  unit->make_faces(params);
  return unit;
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
  schedule_->forget(*this);
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
void Unit::make_bundles(const std::vector<NamedParam>& params) {
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
         .face = WeakImpl(tensor.getIntrusivePtr()),
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
      shard.narrow(0, run.shard_begin, run.numel)
          .copy_(whole.reshape({-1}).narrow(0, run.param_begin, run.numel));
    }
    bundles_.emplace_back(
        std::move(layout), shard, device, groups_, options_, schedule_->pool());
    set_owner(bundles_.back().storage(), {this, false});
    set_owner(storage_of(shard), {this, true});
  }
}

void Unit::make_leaves() {
  for (Param& param : params_) {
    const Bundle& bundle = bundles_[param.bundle];
    if (options_.one_leaf) {
      param.leaf = &param == params_.data()
          ? alias_of(bundle.shard(), bundle.shard().sizes(), 0, true)
          : params_.front().leaf;
    } else {
      const Layout& layout = bundle.layout();
      const int rank = groups_.shard.rank();
      param.leaf = alias_of(
          bundle.shard(),
          layout.local_shape(param.index, rank),
          layout.run(param.index, rank).shard_begin,
          true);
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
      true);
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
    face.unsafeGetTensorImpl()->set_autograd_meta(nullptr);
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

ShardedTensor Unit::sharded(const c10::TensorImpl* face) const {
  const Place place = place_of(face);
  const Bundle& bundle = bundles_[place.bundle];
  const Shape& shape = bundle.layout().shape(place.index);
  const Run run = bundle.layout().run(place.index, groups_.shard.rank());
  std::vector<ShardedTensor::Piece> pieces;
  int64_t begin = run.shard_begin;
  for (Box& box : boxes_of(shape, run.param_begin, run.numel)) {
    const at::Tensor part = alias_of(bundle.shard(), box.sizes, begin, true);
    begin += box.numel();
    pieces.push_back({std::move(box), part});
  }
  return {
      shape, bundle.shard().scalar_type(), std::move(pieces), groups_.shard};
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
  for (const auto& hook : std::exchange(write_hooks_, {})) {
    hook();
  }
  for (Bundle& bundle : bundles_) {
    bundle.before_write();
  }
  ++root().writes_;
}

void Unit::before_next_write(std::function<void()> hook) {
  write_hooks_.push_back(std::move(hook));
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

void Unit::start_gather() {
  if (state_ != UnitState::Sharded) {
    return;
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
  schedule_->note_gather(*this);
  if (changed) {
    // A graph of the old values must not run backward with the new ones.
    for (const Param& param : params_) {
      if (const auto face = param.face.lock()) {
        face->bump_version();
      }
    }
  }
}

void Unit::finish_gather() {
  if (state_ != UnitState::Gathering) {
    return;
  }
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  state_ = UnitState::Full;
  try {
    const auto waiting = schedule_->watch(ShardEvent::Kind::GatherWait, *this);
    for (Bundle& bundle : bundles_) {
      bundle.finish_gather();
    }
  } catch (...) {
    for (Bundle& bundle : bundles_) {
      bundle.settle();
    }
    reshard(); // garbage must not look Full
    throw;
  }
}

void Unit::reshard() {
  if (state_ == UnitState::Gathering) {
    finish_gather(); // the memory is still being written
  }
  if (state_ != UnitState::Full) {
    return;
  }
  state_ = UnitState::Sharded;
  is_pinned_ = false;
  for (Bundle& bundle : bundles_) {
    bundle.free_full(raw_access_error_);
  }
  schedule_->note_reshard(*this);
}

/// Full gradients by position, defined where any rank has one.
std::vector<at::Tensor> Unit::gather_gradients() {
  std::vector<at::Tensor> result(params_.size());
  at::Tensor defined =
      at::zeros({static_cast<int64_t>(params_.size())}, at::kByte);
  for (size_t position = 0; position < params_.size(); ++position) {
    if (params_[position].leaf.grad().defined()) {
      defined[static_cast<int64_t>(position)] = 1;
    }
  }
  groups_.shard.all_reduce(defined, ReduceOp::Max, label_);
  for (size_t number = 0; number < bundles_.size(); ++number) {
    const Bundle& bundle = bundles_[number];
    const Layout& layout = bundle.layout();
    at::Tensor part; // zeros stand in for what only others have
    for (size_t position = 0; position < params_.size(); ++position) {
      const Param& param = params_[position];
      if (param.bundle != number ||
          defined[static_cast<int64_t>(position)].item<uint8_t>() == 0) {
        continue;
      }
      if (!part.defined()) {
        part = at::zeros_like(bundle.shard());
      }
      const at::Tensor& gradient = param.leaf.grad();
      const Run run = layout.run(param.index, groups_.shard.rank());
      if (gradient.defined() && run.numel > 0) {
        part.narrow(0, run.shard_begin, run.numel)
            .copy_(gradient.reshape({-1}));
      }
    }
    if (!part.defined()) {
      continue;
    }
    const at::Tensor full = bundle.gather_copy(part, label_);
    for (size_t position = 0; position < params_.size(); ++position) {
      const Param& param = params_[position];
      if (param.bundle == number &&
          defined[static_cast<int64_t>(position)].item<uint8_t>() != 0) {
        result[position] = alias_of(
            full, layout.shape(param.index), layout.full_offset(param.index));
      }
    }
  }
  return result;
}

void Unit::show_summoned(
    Param& param,
    const at::Tensor& full,
    const at::Tensor& grad) {
  const at::Tensor face = param.lock();
  if (!face.defined()) {
    return;
  }
  const Layout& layout = bundles_[param.bundle].layout();
  show(
      face,
      alias_of(
          full, layout.shape(param.index), layout.full_offset(param.index)));
  auto& meta = meta_of(face);
  meta.grad_fn_ = NodePtr();
  meta.output_nr_ = 0;
  meta.requires_grad_ = param.trainable;
  meta.grad_ = grad;
  if (unit_of(face) == nullptr) {
    autograd::impl::add_hook(
        face, std::make_unique<KeepAlive>(shared_from_this()));
  }
}

void Unit::summon(const SummonOptions& options) {
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  check_faces("summon_full_params");
  follow_requires_grad();
  finish_gather();
  auto summoning = std::make_unique<Summoning>();
  summoning->options = options;
  summoning->shown = !options.rank0_only || groups_.shard.rank() == 0;
  if (options_.param_dtype || is_stale()) {
    reshard();
  }
  summoning->before = state_;
  summoning->node = node_.lock();
  const bool exposes = exposes_shard();
  for (const Bundle& bundle : bundles_) {
    at::Tensor full = exposes ? bundle.shard()
        : state_ == UnitState::Full
        ? bundle.full().clone()
        : bundle.gather_copy(bundle.shard(), label_);
    if (options.offload_to_cpu) {
      full = full.to(at::kCPU);
    }
    summoning->full.push_back(summoning->shown ? full : at::Tensor());
  }
  std::vector<at::Tensor> gradients(params_.size());
  if (options.with_grads && exposes) {
    for (size_t position = 0; position < params_.size(); ++position) {
      gradients[position] = params_[position].leaf.grad();
    }
  } else if (options.with_grads) {
    gradients = gather_gradients();
  }
  if (exposes) { // what is shown now may be written without being seen
    for (const auto& hook : std::exchange(write_hooks_, {})) {
      hook();
    }
  }
  if (summoning->shown) {
    for (size_t position = 0; position < params_.size(); ++position) {
      Param& param = params_[position];
      show_summoned(param, summoning->full[param.bundle], gradients[position]);
      const at::Tensor face = param.lock();
      summoning->versions.push_back(
          face.defined() ? static_cast<uint32_t>(face._version()) : 0);
    }
  }
  schedule_->note_summon(*this);
  state_ = UnitState::Summoned;
  summoned_ = std::move(summoning);
}

/// Why what a user did to the shown parameters cannot be kept, if so.
std::optional<std::string> Unit::objection_to_faces() const {
  for (const Param& param : params_) {
    const at::Tensor face = param.lock();
    const Bundle& bundle = bundles_[param.bundle];
    const Shape& shape = bundle.layout().shape(param.index);
    if (face.defined() &&
        (face.sizes() != at::IntArrayRef(shape) ||
         face.scalar_type() != bundle.shard().scalar_type())) {
      std::ostringstream text;
      text << "parameter \"" << param.name << "\" is now "
           << c10::toString(face.scalar_type()) << ' ' << face.sizes()
           << "; expected " << c10::toString(bundle.shard().scalar_type())
           << ' ' << at::IntArrayRef(shape)
           << ". A sharded parameter keeps its shape and dtype.";
      return text.str();
    }
  }
  return std::nullopt;
}

/// True if a face was written while Summoned, as far as this rank can tell.
bool Unit::was_written() const {
  for (size_t position = 0; position < params_.size(); ++position) {
    const Param& param = params_[position];
    const at::Tensor face = param.lock();
    if (!face.defined()) {
      continue;
    }
    if (static_cast<uint32_t>(face._version()) !=
            summoned_->versions[position] ||
        storage_of(face) != storage_of(summoned_->full[param.bundle])) {
      return true;
    }
    const Bundle& bundle = bundles_[param.bundle];
    const Run run = bundle.layout().run(param.index, groups_.shard.rank());
    // Raw pointers leave no trace but the values.
    if (!at::equal(
            face.detach()
                .reshape({-1})
                .narrow(0, run.param_begin, run.numel)
                .to(bundle.shard().device()),
            bundle.shard().narrow(0, run.shard_begin, run.numel))) {
      return true;
    }
  }
  return false;
}

void Unit::write_back() {
  for (const Param& param : params_) {
    const at::Tensor face = param.lock();
    const Bundle& bundle = bundles_[param.bundle];
    const Run run = bundle.layout().run(param.index, groups_.shard.rank());
    if (face.defined() && run.numel > 0 &&
        storage_of(face) != storage_of(bundle.shard())) {
      bundle.shard()
          .narrow(0, run.shard_begin, run.numel)
          .copy_(face.detach().reshape({-1}).narrow(
              0, run.param_begin, run.numel));
    }
  }
}

void Unit::write_back_gradients() {
  for (const Param& param : params_) {
    const at::Tensor face = param.lock();
    const Run run =
        bundles_[param.bundle].layout().run(param.index, groups_.shard.rank());
    if (!face.defined() || !face.grad().defined() || run.numel == 0) {
      continue;
    }
    if (face.grad().is_same(param.leaf.grad())) {
      continue;
    }
    const at::Tensor part = face.grad()
                                .reshape({-1})
                                .narrow(0, run.param_begin, run.numel)
                                .view(param.leaf.sizes());
    at::Tensor& gradient = param.leaf.mutable_grad();
    if (gradient.defined()) {
      gradient.copy_(part);
    } else {
      gradient = part.to(param.leaf.options(), false, /*copy=*/true);
    }
  }
}

void Unit::hide_summoned() {
  for (Param& param : params_) {
    const at::Tensor face = param.lock();
    if (!face.defined()) {
      continue;
    }
    show(face, face_alias(param));
    auto& meta = meta_of(face);
    meta.grad_.reset();
    meta.grad_fn_ = NodePtr();
    // The flag may have been changed inside: that freezes or thaws.
    param.trainable = meta.requires_grad_;
    set_trainable(param, param.trainable);
  }
}

void Unit::end_summon() {
  if (state_ != UnitState::Summoned) {
    return;
  }
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  const SummonOptions options = summoned_->options;
  const bool exposes = exposes_shard();
  std::optional<std::string> objection;
  bool changed = false;
  std::exception_ptr failure;
  try {
    if (summoned_->shown && (exposes || options.writeback)) {
      objection = objection_to_faces();
      changed = !objection && was_written();
    }
    if ((exposes || options.writeback) && groups_.all.size() > 1) {
      // One rank's change makes every rank gather again, those of other copies
      // too, and one rank's error is everyone's.
      at::Tensor any = at::zeros({1}, at::kByte);
      any.mutable_data_ptr<uint8_t>()[0] = objection ? 2 : changed ? 1 : 0;
      groups_.all.all_reduce(any, ReduceOp::Max, label_);
      const auto worst = any.item<uint8_t>();
      changed = worst == 1;
      if (worst == 2 && !objection) {
        objection = "another rank could not keep its changes.";
      }
    }
    if (changed) {
      state_ = summoned_->before; // no longer refused
      count_write();
      write_back();
    }
    if (options.with_grads && (options.writeback || exposes) && !objection &&
        summoned_->shown) {
      write_back_gradients();
    }
  } catch (...) {
    failure = std::current_exception();
  }
  // Whatever happened, nothing stays summoned.
  const auto summoned = std::move(summoned_);
  state_ = summoned->before;
  if (summoned->shown) {
    hide_summoned();
  }
  if (changed) {
    reshard();
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
  if (objection) {
    fail("summon_full_params", "", *objection + " Nothing was written back.");
  }
}

void Unit::take_gradients(std::vector<at::Tensor>&& gradients) {
  check_faces("backward");
  schedule_->finish_reductions(); // its buffer serves these gradients
  bool any = false;
  for (size_t number = 0; number < bundles_.size(); ++number) {
    std::vector<at::Tensor> mine;
    std::vector<bool> trainable;
    for (size_t position = 0; position < params_.size(); ++position) {
      if (params_[position].bundle == number) {
        mine.push_back(std::move(gradients[position]));
        trainable.push_back(params_[position].trainable);
      }
    }
    if (std::find(trainable.begin(), trainable.end(), true) !=
        trainable.end()) {
      bundles_[number].add_gradients(mine, trainable);
      any = true;
    }
  }
  gradients.clear();
  if (!is_root()) {
    reshard();
  }
  if (any && syncs_gradients_) {
    start_reduction();
  }
}

bool Unit::has_waiting_gradients() const {
  return std::any_of(
      bundles_.begin(), bundles_.end(), [&](const Bundle& bundle) {
        return bundle.has_waiting(all_reduces_) && !bundle.is_reducing();
      });
}

void Unit::start_reduction() {
  schedule_->note_reduction(*this); // first: it must be dropped if this throws
  for (Bundle& bundle : bundles_) {
    if (bundle.has_waiting(all_reduces_)) {
      bundle.start_reduction(all_reduces_, label_);
    }
  }
}

Unit::Reduced Unit::wait_for_reduction() {
  Reduced result{
      std::vector<at::Tensor>(params_.size()),
      std::vector<bool>(params_.size(), true)}; // frozen ones: not in doubt
  for (size_t number = 0; number < bundles_.size(); ++number) {
    Bundle& bundle = bundles_[number];
    if (!bundle.is_reducing()) {
      continue;
    }
    const auto waiting = schedule_->watch(ShardEvent::Kind::ReduceWait, *this);
    const auto [mean, used] = bundle.finish_reduction(label_);
    if (!mean.defined()) {
      continue;
    }
    if (options_.one_leaf) { // stands for all, at the first one's position
      if (params_.front().trainable) {
        result.gradients.front() = alias_of(mean, mean.sizes(), 0);
        result.used.front() =
            std::find(used.begin(), used.end(), true) != used.end();
      }
      continue;
    }
    for (size_t position = 0; position < params_.size(); ++position) {
      const Param& param = params_[position];
      if (param.bundle != number || !param.trainable) {
        continue;
      }
      const Layout& layout = bundle.layout();
      const Run run = layout.run(param.index, groups_.shard.rank());
      result.used[position] = used[param.index];
      if (run.numel > 0 || layout.kind() == Layout::Kind::Dim0 ||
          layout.num_ranks() == 1) {
        result.gradients[position] =
            alias_of(mean, param.leaf.sizes(), run.shard_begin);
      }
    }
  }
  return result;
}

std::vector<at::Tensor> Unit::finish_reduction_apart() {
  return wait_for_reduction().gradients;
}

std::vector<bool> Unit::finish_reduction() {
  if (std::none_of(bundles_.begin(), bundles_.end(), [](const Bundle& bundle) {
        return bundle.is_reducing();
      })) {
    return {};
  }
  std::vector<at::Tensor> sums;
  std::vector<at::Tensor> terms;
  const auto [gradients, used] = wait_for_reduction();
  zeros_stand_in_.resize(params_.size(), false);
  for (size_t position = 0; position < params_.size(); ++position) {
    if (!gradients[position].defined()) {
      continue;
    }
    at::Tensor& sum = params_[position].leaf.mutable_grad();
    if (sum.defined()) {
      sums.push_back(sum);
      terms.push_back(gradients[position]);
      zeros_stand_in_[position] = zeros_stand_in_[position] && !used[position];
    } else {
      sum = gradients[position];
      zeros_stand_in_[position] = !used[position];
    }
  }
  if (!sums.empty()) {
    at::_foreach_add_(sums, terms);
  }
  return used;
}

void Unit::drop_gradients(const std::vector<bool>& by_position) {
  for (size_t position = 0; position < zeros_stand_in_.size(); ++position) {
    if (zeros_stand_in_[position] && by_position[position]) {
      params_[position].leaf.mutable_grad().reset();
    }
  }
  zeros_stand_in_.clear();
}

void Unit::drop_reduction() noexcept {
  zeros_stand_in_.clear();
  for (Bundle& bundle : bundles_) {
    bundle.drop_reduction();
  }
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

} // namespace tessera::shard
