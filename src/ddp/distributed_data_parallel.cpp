#include <tessera/comm/agree.h>
#include <tessera/comm/init.h>
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/engine/seed.h>
#include <tessera/error.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "comm/group/all_or_none.h"
#include "comm/group/broadcast_owned.h"
#include "ddp/reducer.h"
#include "engine/names.h"
#include "engine/plain_params.h"
#include "engine/unit.h"
#include "libtorch/recording.h"

namespace tessera::detail {
namespace {

constexpr const char* kName = "DistributedDataParallel";
constexpr double kBytesPerMb = 1 << 20;

using ddp::NamedParam;

/// Tied parameters appear once, under their first name.
std::vector<NamedParam> distinct_parameters(const torch::nn::Module& module) {
  std::vector<NamedParam> params;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    if (item.value().defined() &&
        seen.insert(item.value().unsafeGetTensorImpl()).second) {
      params.push_back({engine::clean_name(item.key()), item.value()});
    }
  }
  return params;
}

std::vector<at::Tensor> buffers_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> buffers;
  for (const at::Tensor& buffer : module.buffers()) {
    if (buffer.defined()) {
      buffers.push_back(buffer);
    }
  }
  return buffers;
}

/// What the ranks of a Join exchange before an iteration.
struct Announcement {
  float reduces = 0; // this iteration ends with a reduction of gradients
  float sends_buffers = 0; // and begins with one of buffers
  float source = -1; // the highest rank that still trains

  /// The maximum of each field over all ranks. Collective.
  Announcement over_ranks(const Group& group) const {
    const at::Tensor wire = at::empty({3}, at::TensorOptions(at::kFloat));
    auto* values = wire.data_ptr<float>();
    values[0] = reduces;
    values[1] = sends_buffers;
    values[2] = source;
    group.all_reduce(wire, ReduceOp::Max, "ddp: iteration under Join");
    return {values[0], values[1], values[2]};
  }
};

} // namespace

struct DDPHandle::Impl {
  std::shared_ptr<torch::nn::Module> module;
  DDPOptions options;
  Group group;
  std::unique_ptr<ddp::Reducer> reducer;
  bool is_announced = false; // this iteration, to a Join
  bool buffers_are_due = true; // since the last reduction
  const std::shared_ptr<char> life = std::make_shared<char>();

  ErrorSite site() const {
    return {.call = kName, .rank = group.rank(), .world_size = group.size()};
  }

  /// A captured step that sends buffers cannot stand for one that does not.
  void take_part_in_recording() {
    libtorch::take_part_in_recording(
        {.owner = this,
         .lives = [life = std::weak_ptr(life)] { return !life.expired(); },
         .settings =
             [this] { return std::string(buffers_are_due ? "due" : ""); },
         .forget = [this, due = buffers_are_due] { buffers_are_due = due; },
         .finish =
             [this] {
               return [this, due = buffers_are_due] { buffers_are_due = due; };
             }});
  }

  std::vector<NamedParam> check_params() const {
    std::vector<NamedParam> params = distinct_parameters(*module);
    for (const auto& [name, tensor] : params) {
      ErrorSite where = site();
      where.parameter = name;
      if (engine::is_sharded(tensor)) {
        raise<c10::ValueError>(
            where,
            "it is sharded by FSDP, which averages gradients itself. Use one of them.");
      }
      if (tensor.is_meta()) {
        raise<c10::ValueError>(
            where,
            "it is still on the meta device. Materialize and initialize it first.");
      }
    }
    const bool any =
        std::any_of(params.begin(), params.end(), [](const auto& param) {
          return param.tensor.requires_grad();
        });
    if (!any) {
      raise<c10::ValueError>(
          site(),
          "the module has no parameter that requires a gradient, so there is nothing to average. Use it without DistributedDataParallel.");
    }
    return params;
  }

  void agree_on(const std::vector<NamedParam>& params) const {
    std::vector<std::string> items;
    for (const auto& [name, tensor] : params) {
      items.push_back(fmt::format(
          "{}: {}{}{}",
          name,
          c10::toString(tensor.scalar_type()),
          tensor.sizes().vec(),
          tensor.requires_grad() ? "" : ", frozen"));
    }
    for (const at::Tensor& buffer : buffers_of(*module)) {
      items.push_back(fmt::format(
          "buffer: {}{}",
          c10::toString(buffer.scalar_type()),
          buffer.sizes().vec()));
    }
    items.push_back(fmt::format(
        "bucket_cap_mb {}, first_bucket_mb {}, find_unused_parameters {}, static_graph {}",
        options.bucket_cap_mb(),
        options.first_bucket_mb(),
        options.find_unused_parameters(),
        options.static_graph()));
    agree(group, kName, items);
  }

  /// Trainable parameters that were added or thawed after the reducer was made.
  std::vector<std::string> unknown_params() const {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : distinct_parameters(*module)) {
      if (tensor.requires_grad() && !engine::is_averaged(tensor)) {
        names.push_back(name);
      }
    }
    return names;
  }

  void broadcast(std::vector<at::Tensor> tensors, int source) const {
    std::vector<std::vector<at::Tensor>> owned(group.size());
    owned[source] = std::move(tensors);
    comm::broadcast_owned(group, owned);
  }

  void broadcast_model(int source) const {
    std::vector<at::Tensor> all = buffers_of(*module);
    for (const auto& param : distinct_parameters(*module)) {
      all.push_back(param.tensor);
    }
    broadcast(std::move(all), source);
  }

  void broadcast_buffers(int source) const {
    broadcast(buffers_of(*module), source);
  }
};

DDPHandle::DDPHandle(
    std::shared_ptr<torch::nn::Module> module,
    const DDPOptions& options)
    : impl_(std::make_unique<Impl>()) {
  Impl& impl = *impl_;
  impl.module = std::move(module);
  impl.options = options;
  impl.group = options.process_group() ? *options.process_group() : world();
  std::vector<NamedParam> params;
  comm::all_or_none({impl.group}, kName, [&] { params = impl.check_params(); });
  impl.agree_on(params);
  if (options.init_sync()) {
    impl.broadcast_model(0);
  }
  seed_per_rank(); // the model is built
  std::erase_if(params, [](const NamedParam& param) {
    return !param.tensor.requires_grad();
  });
  impl.reducer = std::make_unique<ddp::Reducer>(
      impl.group,
      std::move(params),
      ddp::ReducerOptions{
          .limits =
              {.first_bucket_bytes = static_cast<int64_t>(
                   options.first_bucket_mb() * kBytesPerMb),
               .bucket_bytes =
                   static_cast<int64_t>(options.bucket_cap_mb() * kBytesPerMb)},
          .gradient_as_bucket_view = options.gradient_as_bucket_view(),
          .tolerates_unused =
              options.find_unused_parameters() || options.static_graph(),
          .rebuilds_after = options.static_graph() ? 2 : 1},
      [this] { before_reduction(); },
      [&impl] { return impl.unknown_params(); });
}

DDPHandle::~DDPHandle() = default;

void DDPHandle::announce(bool reduces, bool sends_buffers) {
  Join::notify_join_context(*this);
  const Announcement all =
      Announcement{
          .reduces = reduces ? 1.f : 0.f,
          .sends_buffers = sends_buffers ? 1.f : 0.f,
          .source = static_cast<float>(impl_->group.rank())}
          .over_ranks(impl_->group);
  impl_->is_announced = reduces;
  if (sends_buffers) {
    impl_->broadcast_buffers(static_cast<int>(all.source));
  }
}

bool DDPHandle::is_joined() const {
  return active_join() != nullptr && active_join()->options().enable();
}

void DDPHandle::before_forward() {
  Impl& impl = *impl_;
  const bool sends_buffers = impl.options.broadcast_buffers() &&
      impl.buffers_are_due && impl.group.size() > 1 &&
      !buffers_of(*impl.module).empty();
  const bool reduces = at::GradMode::is_enabled() && impl.reducer->syncs();
  impl.take_part_in_recording();
  if (is_joined()) {
    announce(reduces, sends_buffers);
  } else if (sends_buffers) {
    impl.broadcast_buffers(0);
  }
  if (reduces && impl.module->is_training()) {
    impl.reducer->note_forward();
  }
  // While gradients only accumulate, buffers are not synchronized.
  impl.buffers_are_due = impl.reducer->syncs();
}

void DDPHandle::before_reduction() {
  if (is_joined() && !impl_->is_announced) {
    announce(true, false);
  }
  impl_->is_announced = false;
}

void DDPHandle::set_requires_gradient_sync(bool on) {
  impl_->reducer->set_sync(on);
}

void DDPHandle::reduce_gradients() {
  impl_->reducer->reduce_accumulated();
}

DDPHandle::NoSync::NoSync(DDPHandle& handle)
    : handle_(handle), before_(handle.impl_->reducer->syncs()) {
  handle_.set_requires_gradient_sync(false);
}

DDPHandle::NoSync::~NoSync() {
  handle_.set_requires_gradient_sync(before_);
}

void DDPHandle::register_comm_hook(CommHook hook) {
  if (impl_->reducer->has_hook() || hook == nullptr) {
    raise<c10::ValueError>(
        impl_->site(),
        hook == nullptr
            ? "the communication hook is empty."
            : "register_comm_hook can only be called once: a hook is registered already. Make one hook that does both.");
  }
  impl_->reducer->set_hook(
      std::move(hook),
      impl_->group.split(0, impl_->group.rank(), "ddp hooks").value());
}

bool DDPHandle::has_rebuilt_buckets() const {
  return impl_->reducer->has_rebuilt();
}

/// What a rank without inputs does in each iteration.
class DDPHandle::Hook : public JoinHook {
 public:
  explicit Hook(DDPHandle& handle) : impl_(*handle.impl_) {}

  void main_hook() override {
    const Announcement all = Announcement{}.over_ranks(impl_.group);
    if (all.sends_buffers != 0) {
      impl_.broadcast_buffers(static_cast<int>(all.source));
    }
    if (all.reduces != 0) {
      impl_.reducer->shadow();
    }
  }

  void post_hook(bool is_last_joiner) override {
    const Announcement all =
        Announcement{
            .source =
                is_last_joiner ? static_cast<float>(impl_.group.rank()) : -1.f}
            .over_ranks(impl_.group);
    impl_.broadcast_model(static_cast<int>(all.source));
    // Ranks with more inputs have made a step since their last backward.
    impl_.reducer->forget_steps();
  }

 private:
  Impl& impl_;
};

std::unique_ptr<JoinHook> DDPHandle::join_hook(const JoinArguments& arguments) {
  const auto divides = arguments.find("divide_by_initial_world_size");
  if (divides != arguments.end() && !std::any_cast<bool>(divides->second)) {
    raise<c10::NotImplementedError>(
        impl_->site(),
        "divide_by_initial_world_size=false is not supported: averages under Join are over all ranks. Scale the loss instead.");
  }
  return std::make_unique<Hook>(*this);
}

at::Device DDPHandle::join_device() const {
  return distinct_parameters(*impl_->module).front().tensor.device();
}

Group DDPHandle::join_process_group() const {
  return impl_->group;
}

} // namespace tessera::detail
