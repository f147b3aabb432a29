#include "engine/first_touch.h"

#include <tessera/error.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "comm/raw_access.h"
#include "engine/caller.h"
#include "engine/owners.h"
#include "engine/schedule.h"
#include "engine/shard_gradient.h"
#include "engine/unit.h"

namespace tessera::engine {
namespace {

using Units = c10::SmallVector<Unit*, 4>;

/// A shard, or a view of one, that an operator writes.
struct Write {
  Unit* unit = nullptr;
  at::Tensor shard;
};

/// The units that an operator uses.
struct Uses {
  Units read; // full parameters
  c10::SmallVector<Write, 4> written; // shards

  void add_read(Unit* unit) {
    if (std::find(read.begin(), read.end(), unit) == read.end()) {
      read.push_back(unit);
    }
  }
  /// One write for each unit is enough, but for a unit that notes what of it
  /// was written.
  void add_write(Unit* unit, const at::Tensor& shard) {
    const bool is_known =
        std::any_of(written.begin(), written.end(), [unit](const Write& write) {
          return write.unit == unit;
        });
    if (!is_known || unit->start().is_open()) {
      written.push_back({unit, shard});
    }
  }
};

[[noreturn]] void refuse_write(const Unit& unit, std::string_view call) {
  raise(
      {.call = call, .unit = unit.name()},
      "this writes to a sharded parameter, and the write would be lost at the next reshard. Do it inside tessera::summon_full_params(module), change the shards that tessera::parameters(module) gives, or change the parameters before fully_shard.");
}

/// torch::optim::LBFGS takes dot products of all parameters: over a rank's own
/// part they are wrong, and each rank would take another step. LBFGS updates
/// parameters by `update.view_as(parameter)`; other code may do so too.
void refuse_lbfgs(
    const c10::OperatorHandle& op,
    const torch::jit::Stack& stack) {
  static constexpr std::string_view kWithin = "aten::view_as";
  if (op.schema().name() != kWithin) {
    return;
  }
  const StorageOwner owner = find_owner(storage_of(stack.back().toTensor()));
  if (owner.is_shard && is_called_by("5optim5LBFGS")) {
    raise(
        {.call = "torch::optim::LBFGS::step", .unit = owner.unit->name()},
        "LBFGS needs dot products over all parameters, and a rank has only its shards. Use another optimizer, or train a model that is not sharded with it.");
  }
}

/// Adds the unit that `tensor` belongs to, if it is a face, or a shard that is
/// written to, or a view of one. `call` is an operator, or a call that bypasses
/// operators.
void collect(
    const at::Tensor& tensor,
    bool is_write,
    std::string_view call,
    Uses& uses) {
  if (!tensor.defined() ||
      !tensor.unsafeGetTensorImpl()->key_set().has(kShardKey)) {
    return;
  }
  const auto* storage =
      tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const StorageOwner owner = find_owner(storage);
  if (owner.unit == nullptr) {
    if (storage->nbytes() == 0 && tensor.numel() != 0) {
      raise(
          {.call = call},
          "this parameter belonged to a sharded model that no longer exists.");
    }
    return;
  }
  if (owner.is_shard) {
    if (is_write) {
      uses.add_write(owner.unit, tensor);
    }
    return;
  }
  if (is_write) {
    refuse_write(*owner.unit, call);
  }
  uses.add_read(owner.unit);
}

/// Tensor::set_data(), and so Module::to(), replaces the contents of a tensor
/// without an operator, but first it calls one that asks whether it may. Other
/// operators give a tensor other memory, which the unit of a shard would never
/// see; on a parameter they are writes, see collect().
void refuse_other_memory(
    const c10::OperatorHandle& op,
    const torch::jit::Stack& stack) {
  const std::string_view name = op.schema().name();
  const bool is_set_data = name == "aten::_has_compatible_shallow_copy_type";
  if (!is_set_data && name != "aten::set_" && name != "aten::resize_" &&
      name != "aten::resize_as_") {
    return;
  }
  const size_t first = stack.size() - op.schema().arguments().size();
  const at::Tensor& tensor = stack[first].toTensor();
  if (!tensor.unsafeGetTensorImpl()->key_set().has(kShardKey)) {
    return;
  }
  const StorageOwner owner = find_owner(storage_of(tensor));
  if (owner.unit != nullptr && (is_set_data || owner.is_shard)) {
    raise(
        {.call = is_set_data ? "set_data" : name, .unit = owner.unit->name()},
        owner.is_shard
            ? "this would separate a shard from its unit. Write into the shard instead, with copy_."
            : "this replaces the data of a sharded parameter (Module::to or set_data). Do that before sharding, or write inside tessera::summon_full_params(module).");
  }
}

/// See [Note: gradients of shards] in shard_gradient.h.
void refuse_clip_by_a_part(
    const c10::OperatorHandle& op,
    const torch::jit::Stack& stack) {
  const c10::OperatorName& name = op.operator_name();
  if (name.name != "aten::mul_" || name.overload_name != "Tensor") {
    return;
  }
  const c10::IValue& self = stack[stack.size() - 2];
  const c10::IValue& factor = stack[stack.size() - 1];
  if (factor.isTensor() && factor.toTensor().dim() == 0 && self.isTensor() &&
      is_data_of_gradient(self.toTensor())) {
    raise(
        {.call = "clip_grad_norm_"},
        "this scales the gradients of shards by a norm that one rank computed from its own part, as torch::nn::utils::clip_grad_norm_ does, so each rank would use a different factor. Clip with tessera::clip_grad_norm_(model, max_norm); with a factor that is the same on all ranks, multiply the gradient itself and not its data().");
  }
}

/// c10d's own collectives, whose schemas do not say that they write.
bool writes_first_argument(const c10::FunctionSchema& schema) {
  const std::string_view name = schema.name();
  return name.starts_with("c10d::") && name.ends_with('_');
}

void collect_all(
    const c10::OperatorHandle& op,
    const torch::jit::Stack& stack,
    Uses& uses) {
  refuse_other_memory(op, stack);
  refuse_clip_by_a_part(op, stack);
  refuse_lbfgs(op, stack);
  const auto& arguments = op.schema().arguments();
  const size_t first = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = stack[first + i];
    const auto* alias = arguments[i].alias_info();
    const bool is_write = (alias != nullptr && alias->isWrite()) ||
        (i == 0 && writes_first_argument(op.schema()));
    if (value.isTensor()) {
      collect(value.toTensor(), is_write, op.schema().name(), uses);
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor()) {
          collect(element.toTensor(), is_write, op.schema().name(), uses);
        }
      }
    }
  }
}

/// An operator may combine models over different groups: handles one schedule
/// at a time.
void touch_by_schedule(Units units) {
  while (!units.empty()) {
    Schedule& schedule = units.front()->schedule();
    Units mine;
    Units rest;
    for (Unit* unit : units) {
      (&unit->schedule() == &schedule ? mine : rest).push_back(unit);
    }
    schedule.touch({mine.data(), mine.size()});
    units = rest;
  }
}

/// Makes what is read full, and then counts the writes: a gather that the same
/// operator needs is one of what was there before.
void begin_uses(Uses uses) {
  touch_by_schedule(std::move(uses.read));
  for (const Write& write : uses.written) {
    write.unit->count_write(write.shard);
  }
}

/// Operators that refuse operands of several floating dtypes. All others
/// promote them, or take parameters of another dtype than the input.
const std::unordered_set<std::string_view>& strict_operators() {
  static const auto& names = *new std::unordered_set<std::string_view>{
      "aten::_convolution",
      "aten::addbmm",
      "aten::addmm",
      "aten::addmv",
      "aten::baddbmm",
      "aten::bilinear",
      "aten::bmm",
      "aten::conv1d",
      "aten::conv2d",
      "aten::conv3d",
      "aten::conv_transpose1d",
      "aten::conv_transpose2d",
      "aten::conv_transpose3d",
      "aten::convolution",
      "aten::dot",
      "aten::einsum",
      "aten::gru",
      "aten::gru_cell",
      "aten::inner",
      "aten::linear",
      "aten::lstm",
      "aten::lstm_cell",
      "aten::matmul",
      "aten::mm",
      "aten::mv",
      "aten::prelu",
      "aten::rnn_relu",
      "aten::rnn_relu_cell",
      "aten::rnn_tanh",
      "aten::rnn_tanh_cell",
      "aten::tensordot"};
  return names;
}

/// For these operators only the input is cast.
bool is_normalization(const std::string& name) {
  return name == "aten::layer_norm" || name == "aten::group_norm" ||
      name == "aten::rms_norm";
}

/// These operators have statistics, which are written to and keep their dtype;
/// weight and bias must have the same dtype.
bool has_statistics(const std::string& name) {
  return name == "aten::batch_norm" || name == "aten::instance_norm";
}

/// (input, weight, bias, running_mean, ...)
void cast_to_statistics(torch::jit::Stack& stack, size_t first) {
  const c10::IValue& mean = stack[first + 3];
  if (!mean.isTensor() || !mean.toTensor().defined()) {
    return;
  }
  for (size_t i : {first + 1, first + 2}) {
    if (stack[i].isTensor() && stack[i].toTensor().defined()) {
      stack[i] = stack[i].toTensor().to(mean.toTensor().scalar_type());
    }
  }
}

/// The dtype that the touched units compute in, if they have a policy.
std::optional<at::ScalarType> compute_dtype(const Units& units) {
  for (const Unit* unit : units) {
    if (unit->options().param_dtype) {
      return unit->options().param_dtype;
    }
  }
  return std::nullopt;
}

bool clashes(const c10::IValue& value, at::ScalarType dtype) {
  return value.isTensor() && value.toTensor().defined() &&
      value.toTensor().is_floating_point() &&
      value.toTensor().scalar_type() != dtype;
}

/// [Note: operands under mixed precision]
///
/// Full parameters have the unit's compute dtype, but other operands need not:
/// a model called by its plain forward() gets float inputs. If an operator
/// would refuse the mixture, its other floating operands are cast here. This is
/// above autograd, so the cast is part of the graph and gradients flow back in
/// the dtype they came in.
void cast_operands(
    const c10::OperatorHandle& op,
    torch::jit::Stack& stack,
    at::ScalarType dtype) {
  const std::string& name = op.schema().name();
  const bool is_norm = is_normalization(name) || has_statistics(name);
  if (!is_norm && !strict_operators().contains(name)) {
    return;
  }
  const size_t count = op.schema().arguments().size();
  const size_t first = stack.size() - count;
  if (has_statistics(name)) {
    cast_to_statistics(stack, first);
  }
  for (size_t i = 0; i < (is_norm ? 1 : count); ++i) {
    c10::IValue& value = stack[first + i];
    if (clashes(value, dtype)) {
      value = value.toTensor().to(dtype);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (at::Tensor& tensor : tensors) {
        if (clashes(tensor, dtype)) {
          tensor = tensor.to(dtype);
        }
      }
      value = tensors;
    }
  }
}

void fallback(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  Uses uses;
  collect_all(op, *stack, uses);
  const auto dtype = compute_dtype(uses.read);
  begin_uses(std::move(uses));
  if (dtype) {
    cast_operands(op, *stack, *dtype);
  }
  c10::impl::ExcludeDispatchKeyGuard without_key(kShardKey);
  const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, kShardKey);
  op.redispatchBoxed(keys & below, stack);
}

/// See [Note: raw access] in comm/raw_access.h.
void watch_raw_access(
    const at::Tensor& tensor,
    comm::RawAccess access,
    const char* call) {
  Uses uses;
  collect(tensor, access == comm::RawAccess::Write, call, uses);
  begin_uses(std::move(uses));
}

} // namespace

void enable_first_touch() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Never destroyed: operators may run in static destructors.
    static auto* library = new torch::Library(
        torch::Library::IMPL, "_", kShardKey, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
    comm::set_raw_access_watcher(&watch_raw_access);
  });
}

} // namespace tessera::engine
