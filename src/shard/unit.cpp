#include "shard/unit.h"

#include <tessera/error.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <unordered_map>
#include <utility>

#include "compat.h"
#include "shard/autograd_compat.h"
#include "shard/first_touch.h"
#include "shard/gather_node.h"
#include "shard/schedule.h"

namespace tessera::shard {
namespace {

namespace autograd = torch::autograd;

using WeakImpl =
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// Never destroyed: units may die in static destructors.
std::unordered_map<const c10::StorageImpl*, StorageOwner>& owners() {
  static auto& map =
      *new std::unordered_map<const c10::StorageImpl*, StorageOwner>;
  return map;
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

/// Keeps a unit alive from the autograd metadata of its faces. Such hooks run
/// for leaves that require a gradient; faces never are both.
struct KeepAlive : autograd::FunctionPreHook {
  explicit KeepAlive(std::shared_ptr<Unit> owned) : unit(std::move(owned)) {}
  autograd::variable_list operator()(
      const autograd::variable_list& gradients) override {
    return gradients;
  }
  std::shared_ptr<Unit> unit;
};

/// A tensor of its own that shares `base`'s storage and carries the key. Not a
/// view for autograd: optimizers detach gradients in place, which views refuse.
at::Tensor keyed_alias(
    const at::Tensor& base,
    at::IntArrayRef sizes,
    int64_t offset) {
  const auto keys = base.unsafeGetTensorImpl()->key_set().add(kShardKey);
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(base.storage()), keys, base.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  alias.unsafeGetTensorImpl()->set_storage_offset(offset);
  return alias;
}

} // namespace

StorageOwner find_owner(const c10::StorageImpl* storage) {
  const auto found = owners().find(storage);
  return found == owners().end() ? StorageOwner{} : found->second;
}

Unit* unit_of(const at::Tensor& tensor) {
  if (!tensor.defined() ||
      !tensor.unsafeGetTensorImpl()->key_set().has(kShardKey)) {
    return nullptr;
  }
  const StorageOwner owner = find_owner(storage_of(tensor));
  return owner.is_shard ? nullptr : owner.unit;
}

/// One parameter of the unit. Its position in params_ is its input number in
/// the node.
struct Unit::Param {
  std::string name;
  WeakImpl face;
  const c10::TensorImpl* face_id = nullptr;
  at::Tensor original; // until make_faces()
  bool trainable = false;
  size_t bundle = 0;
  size_t index = 0; // in the bundle's layout
  at::Tensor leaf;
};

/// The parameters of one dtype.
struct Unit::Bundle {
  std::vector<size_t> params; // positions in params_
  std::optional<Layout> layout;
  at::Tensor shard; // (shard_numel), owns this rank's part
  at::Tensor full; // (full_numel), keyless alias of the faces' storage
  c10::StorageImpl* storage = nullptr; // of `full`
  int64_t num_writes = 0; // to the shard, as first touch saw them
  int64_t gathered_version = -1;

  // A gather in flight.
  at::Tensor gather_input; // the shard in the full buffer's dtype
  at::Tensor gathered; // (ranks, shard_numel), where a copy-out is needed
  Work gather;

  // A reduction in flight, or gradients that wait for one (no sync).
  at::Tensor gradients; // (ranks, shard_numel) in the reduce dtype
  at::Tensor reduced; // (shard_numel)
  std::vector<bool> used; // by index: got a gradient
  Work reduction;

  int64_t version() const {
    return shard._version() + num_writes;
  }
  bool gathers_in_place() const {
    return layout->kind() == Layout::Kind::Flat;
  }
};

Unit::Unit(
    std::string name,
    const Group& group,
    const UnitOptions& options,
    std::shared_ptr<Schedule> schedule)
    : name_(std::move(name)),
      group_(group),
      options_(options),
      schedule_(std::move(schedule)) {}

std::shared_ptr<Unit> Unit::create(
    std::string name,
    const std::vector<NamedParam>& params,
    const Group& group,
    const UnitOptions& options,
    std::shared_ptr<Schedule> schedule) {
  enable_first_touch();
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  std::shared_ptr<Unit> unit(
      new Unit(std::move(name), group, options, std::move(schedule)));
  unit->make_bundles(params);
  unit->make_faces();
  return unit;
}

Unit::~Unit() {
  if (node_ != nullptr) {
    node_->cut_loose();
  }
  for (Bundle& bundle : bundles_) {
    owners().erase(bundle.storage);
    owners().erase(storage_of(bundle.shard));
    for (Work* work : {&bundle.gather, &bundle.reduction}) {
      try {
        work->wait(); // it writes into memory that goes now
      } catch (const std::exception&) {
        // Nobody is left to tell.
      }
    }
  }
  schedule_->forget(*this);
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

void Unit::fail(
    const char* call,
    const std::string& parameter,
    const std::string& what) const {
  raise(
      {.call = call,
       .rank = group_.global_ranks()[static_cast<size_t>(group_.rank())],
       .unit = name_,
       .parameter = parameter},
      what);
}

/// Sorts the parameters by dtype and cuts this rank's shards out of them.
void Unit::make_bundles(const std::vector<NamedParam>& params) {
  std::vector<at::ScalarType> dtypes;
  for (const NamedParam& param : params) {
    const at::Tensor& tensor = param.tensor;
    const auto dtype = tensor.scalar_type();
    auto found = std::find(dtypes.begin(), dtypes.end(), dtype);
    if (found == dtypes.end()) {
      found = dtypes.insert(dtypes.end(), dtype);
      bundles_.emplace_back();
    }
    const auto bundle = static_cast<size_t>(found - dtypes.begin());
    params_.push_back(
        {.name = param.name,
         .face = WeakImpl(tensor.getIntrusivePtr()),
         .face_id = tensor.unsafeGetTensorImpl(),
         .original = tensor,
         .trainable = tensor.requires_grad(),
         .bundle = bundle,
         .index = bundles_[bundle].params.size()});
    bundles_[bundle].params.push_back(params_.size() - 1);
  }
  for (Bundle& bundle : bundles_) {
    std::vector<Shape> shapes;
    for (size_t position : bundle.params) {
      shapes.push_back(params_[position].original.sizes().vec());
    }
    bundle.layout.emplace(options_.layout, std::move(shapes), group_.size());
    const at::Tensor& first = params_[bundle.params.front()].original;
    bundle.shard = at::zeros(
        {bundle.layout->shard_numel()}, first.options().requires_grad(false));
    for (size_t index = 0; index < bundle.params.size(); ++index) {
      const Run run = bundle.layout->run(index, group_.rank());
      const at::Tensor& original = params_[bundle.params[index]].original;
      bundle.shard.narrow(0, run.shard_begin, run.numel)
          .copy_(original.detach().reshape({-1}).narrow(
              0, run.param_begin, run.numel));
    }
    bundle.used.assign(bundle.params.size(), false);
  }
}

/// Turns the module's parameters into faces and makes the leaves.
void Unit::make_faces() {
  auto node = make_node<GatherNode>(this);
  node_ = node.get();
  for (Bundle& bundle : bundles_) {
    const auto dtype = bundle.shard.is_floating_point() && options_.param_dtype
        ? *options_.param_dtype
        : bundle.shard.scalar_type();
    bundle.full = at::empty(
        {bundle.layout->full_numel()}, bundle.shard.options().dtype(dtype));
    bundle.storage = storage_of(bundle.full);
    owners()[bundle.storage] = {this, false};
    owners()[storage_of(bundle.shard)] = {this, true};
  }
  for (Param& param : params_) {
    Bundle& bundle = bundles_[param.bundle];
    at::Tensor face = std::exchange(param.original, at::Tensor());
    auto* impl = face.unsafeGetTensorImpl();
    const at::Tensor alias = keyed_alias(
        bundle.full,
        bundle.layout->shape(param.index),
        bundle.layout->full_offset(param.index));
    impl->shallow_copy_from(alias.getIntrusivePtr());
    impl->set_autograd_meta(nullptr);
    autograd::impl::add_hook(
        face, std::make_unique<KeepAlive>(shared_from_this()));
    // A frozen one has no edge, but keeps its place among the inputs.
    const auto input = node->add_input_metadata(face);
    if (param.trainable) {
      autograd::impl::set_gradient_edge(face, {node, input});
    }
    const Run run = bundle.layout->run(param.index, group_.rank());
    param.leaf = keyed_alias(
        bundle.shard,
        bundle.layout->local_shape(param.index, group_.rank()),
        run.shard_begin);
    param.leaf.set_requires_grad(param.trainable);
  }
  node_edge_ = autograd::Edge(node, 0);
  // The full buffers were never filled: back to the pool until a touch.
  state_ = UnitState::Full;
  schedule_->note_gather(*this);
  reshard();
  schedule_->reset_counts();
}

at::Tensor Unit::leaf_of(const c10::TensorImpl* face) const {
  for (const Param& param : params_) {
    if (param.face_id == face) {
      return param.leaf;
    }
  }
  return {};
}

std::vector<at::Tensor> Unit::leaves() const {
  std::vector<at::Tensor> result;
  for (const Param& param : params_) {
    result.push_back(param.leaf);
  }
  return result;
}

bool Unit::is_stale() const {
  for (const Bundle& bundle : bundles_) {
    if (bundle.gathered_version != -1 &&
        bundle.gathered_version != bundle.version()) {
      return true;
    }
  }
  return false;
}

void Unit::count_write(const c10::StorageImpl* shard) {
  for (Bundle& bundle : bundles_) {
    if (storage_of(bundle.shard) == shard) {
      ++bundle.num_writes;
    }
  }
}

/// Module::to(), set_data() and torch::load() replace what is under a parameter
/// without an operator that could be seen.
void Unit::check_faces(const char* call) const {
  for (const Param& param : params_) {
    const auto face = param.face.lock();
    if (face &&
        face->unsafe_storage().unsafeGetStorageImpl() !=
            bundles_[param.bundle].storage) {
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
  const bool changed = is_stale();
  state_ = UnitState::Gathering;
  for (Bundle& bundle : bundles_) {
    const size_t bytes = bundle.full.numel() * bundle.full.element_size();
#if TESSERA_TORCH_AT_LEAST(2, 13)
    bundle.storage->clear_data_ptr_access_error_msg_();
#endif
    bundle.storage->set_data_ptr_noswap(schedule_->pool().take(
        bytes, bundle.storage->device(), *bundle.storage->allocator()));
    bundle.storage->set_nbytes(bytes);
    bundle.gathered_version = bundle.version();
    const int64_t shard_numel = bundle.layout->shard_numel();
    if (!bundle.gathers_in_place()) {
      bundle.gathered =
          at::empty({group_.size(), shard_numel}, bundle.full.options());
    }
    const at::Tensor target =
        bundle.gathers_in_place() ? bundle.full : bundle.gathered;
    bundle.gather_input = bundle.shard;
    if (bundle.shard.scalar_type() != bundle.full.scalar_type()) {
      // Cast straight into this rank's part of the result.
      bundle.gather_input =
          target.view({-1}).narrow(0, group_.rank() * shard_numel, shard_numel);
      bundle.gather_input.copy_(bundle.shard);
    }
    bundle.gather =
        group_.all_gather_into_async(target, bundle.gather_input, name_);
  }
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
  state_ = UnitState::Full;
  try {
    for (Bundle& bundle : bundles_) {
      std::exchange(bundle.gather, Work()).wait();
      bundle.gather_input.reset();
      if (bundle.gathers_in_place()) {
        continue;
      }
      std::vector<at::Tensor> to;
      std::vector<at::Tensor> from;
      const Layout& layout = *bundle.layout;
      for (size_t index = 0; index < layout.num_params(); ++index) {
        const int64_t chunk = layout.chunk_numel(index);
        to.push_back(
            bundle.full
                .narrow(0, layout.full_offset(index), chunk * group_.size())
                .view({group_.size(), chunk}));
        from.push_back(
            bundle.gathered.narrow(1, layout.chunk_offset(index), chunk));
      }
      at::_foreach_copy_(to, from);
      bundle.gathered.reset();
    }
  } catch (...) {
    reshard(); // garbage must not look Full
    throw;
  }
}

void Unit::reshard() {
  if (state_ == UnitState::Gathering) {
    finish_gather(); // the memory is still being written
  }
  if (state_ == UnitState::Sharded) {
    return;
  }
  state_ = UnitState::Sharded;
  for (Bundle& bundle : bundles_) {
    const size_t bytes = bundle.storage->nbytes();
    schedule_->pool().give(
        bundle.storage->set_data_ptr(
            c10::DataPtr(nullptr, bundle.storage->device())),
        bytes);
    bundle.storage->set_nbytes(0);
#if TESSERA_TORCH_AT_LEAST(2, 13)
    bundle.storage->release_data_and_set_meta_custom_data_ptr_error_msg_(format_error(
        {.call = "data_ptr", .unit = name_},
        "raw access to a sharded parameter, which has no memory now. Use operators, which gather it, or tessera::unshard(module) first."));
#endif
  }
  schedule_->note_reshard(*this);
}

void Unit::zero_gradient_of(
    const Bundle& bundle,
    const at::Tensor& buffer,
    size_t index) const {
  const Layout& layout = *bundle.layout;
  if (layout.kind() == Layout::Kind::Flat) {
    buffer.view({-1})
        .narrow(0, layout.full_offset(index), layout.numel(index))
        .zero_();
  } else {
    buffer.narrow(1, layout.chunk_offset(index), layout.chunk_numel(index))
        .zero_();
  }
}

/// Gradients of one bundle, added to those that wait, as (ranks, shard_numel).
void Unit::copy_in(Bundle& bundle, std::vector<at::Tensor>& gradients) {
  const Layout& layout = *bundle.layout;
  const auto dtype = options_.reduce_dtype.value_or(bundle.shard.scalar_type());
  // Not zeroed: what lies between parameters is never read.
  at::Tensor buffer = at::empty(
      {group_.size(), layout.shard_numel()},
      bundle.shard.options().dtype(dtype));
  std::vector<at::Tensor> to;
  std::vector<at::Tensor> from;
  const auto copy = [&](const at::Tensor& target, const at::Tensor& source) {
    if (source.numel() > 0) {
      to.push_back(target);
      from.push_back(source);
    }
  };
  for (size_t index = 0; index < layout.num_params(); ++index) {
    const Param& param = params_[bundle.params[index]];
    at::Tensor& gradient = gradients[bundle.params[index]];
    if (!param.trainable) {
      continue;
    }
    if (!gradient.defined()) {
      zero_gradient_of(bundle, buffer, index); // a peer may have one
      continue;
    }
    bundle.used[index] = true;
    if (gradient.is_sparse()) {
      gradient = gradient.to_dense();
    }
    const int64_t numel = layout.numel(index);
    if (layout.kind() == Layout::Kind::Flat) {
      copy(
          buffer.view({-1})
              .narrow(0, layout.full_offset(index), numel)
              .view(gradient.sizes()),
          gradient);
      continue;
    }
    // Whole chunks at once, then the last, shorter one.
    const int64_t chunk = layout.chunk_numel(index);
    const int64_t whole = chunk == 0 ? 0 : numel / chunk;
    const at::Tensor flat = gradient.reshape({-1});
    const at::Tensor column =
        buffer.narrow(1, layout.chunk_offset(index), chunk);
    copy(
        column.narrow(0, 0, whole),
        flat.narrow(0, 0, whole * chunk).view({whole, chunk}));
    if (numel > whole * chunk) {
      copy(
          column[whole].narrow(0, 0, numel - whole * chunk),
          flat.narrow(0, whole * chunk, numel - whole * chunk));
    }
  }
  if (!to.empty()) {
    at::_foreach_copy_(to, from);
  }
  if (bundle.gradients.defined()) {
    buffer.add_(bundle.gradients);
  }
  bundle.gradients = std::move(buffer);
}

void Unit::take_gradients(std::vector<at::Tensor>&& gradients) {
  check_faces("backward");
  finish_reduction(); // of an earlier use in this backward, if any
  bool any = false;
  for (Bundle& bundle : bundles_) {
    const bool has_gradients =
        std::any_of(bundle.params.begin(), bundle.params.end(), [&](size_t at) {
          return params_[at].trainable;
        });
    if (!has_gradients) {
      continue;
    }
    copy_in(bundle, gradients);
    any = true;
  }
  gradients.clear();
  if (!is_root() && options_.reshard_after_forward) {
    reshard();
  }
  if (!any || !syncs_gradients_) {
    return;
  }
  for (Bundle& bundle : bundles_) {
    if (!bundle.gradients.defined()) {
      continue;
    }
    bundle.reduced =
        at::empty({bundle.layout->shard_numel()}, bundle.gradients.options());
    bundle.reduction = group_.reduce_scatter_async(
        bundle.reduced, bundle.gradients, ReduceOp::Avg, name_);
  }
  schedule_->note_reduction(*this);
}

void Unit::finish_reduction() {
  for (Bundle& bundle : bundles_) {
    if (!bundle.reduced.defined()) {
      continue;
    }
    std::exchange(bundle.reduction, Work()).wait();
    bundle.gradients.reset();
    const at::Tensor mean = std::exchange(bundle.reduced, at::Tensor())
                                .to(bundle.shard.scalar_type());
    std::vector<at::Tensor> sums;
    std::vector<at::Tensor> terms;
    for (size_t index = 0; index < bundle.params.size(); ++index) {
      Param& param = params_[bundle.params[index]];
      if (!bundle.used[index] || !param.trainable) {
        continue; // stays undefined: zeros would make optimizers act
      }
      const Run run = bundle.layout->run(index, group_.rank());
      if (run.numel == 0 && bundle.layout->kind() == Layout::Kind::Flat) {
        continue;
      }
      const at::Tensor gradient = mean.narrow(0, run.shard_begin, run.numel)
                                      .view(param.leaf.sizes())
                                      .detach();
      at::Tensor& sum = param.leaf.mutable_grad();
      if (sum.defined()) {
        sums.push_back(sum);
        terms.push_back(gradient);
      } else {
        sum = gradient;
      }
    }
    if (!sums.empty()) {
      at::_foreach_add_(sums, terms);
    }
    bundle.used.assign(bundle.params.size(), false);
  }
}

void Unit::drop_reduction() {
  for (Bundle& bundle : bundles_) {
    try {
      std::exchange(bundle.reduction, Work()).wait();
    } catch (const std::exception&) {
      // Dropped because of an error that is on its way to the user already.
    }
    bundle.reduced.reset();
    bundle.gradients.reset();
    bundle.used.assign(bundle.params.size(), false);
  }
}

size_t Unit::full_bytes() const {
  size_t bytes = 0;
  for (const Bundle& bundle : bundles_) {
    bytes += bundle.storage->nbytes();
  }
  return bytes;
}

size_t Unit::shard_bytes() const {
  size_t bytes = 0;
  for (const Bundle& bundle : bundles_) {
    bytes += bundle.shard.nbytes();
  }
  return bytes;
}

} // namespace tessera::shard
