#include "deferred/recorder.h"

#include <tessera/error.h>

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "deferred/deferred_init.h"
#include "deferred/deferred_tensor.h"
#include "libtorch/autograd_compat.h"
#include "libtorch/pickling.h"

namespace tessera::engine {
namespace {

namespace autograd = torch::autograd;

constexpr const char* kUnknownMeta =
    "this operation combines a deferred tensor with a meta tensor that is not deferred and has no values. Create the meta tensor under DeferredInit too.";

thread_local std::weak_ptr<Tape> thread_tape;

/// Whether a normalization layer updates its statistics.
bool is_training(
    const c10::FunctionSchema& schema,
    const torch::jit::Stack& arguments) {
  for (const char* name : {"training", "train", "use_input_stats"}) {
    const auto index = schema.argumentIndexWithName(name);
    if (index && arguments[*index].isBool()) {
      return arguments[*index].toBool();
    }
  }
  return true;
}

struct Input {
  Place place;
  at::Tensor tensor;
  bool is_write;
};

/// An operator and what it was called with.
struct Call {
  Call(const c10::OperatorHandle& operation, const torch::jit::Stack& stack)
      : op(operation), schema(op.schema()) {
    const size_t count = schema.arguments().size();
    arguments = copy_values({stack.data() + (stack.size() - count), count});
    for_each_tensor(
        arguments, [&](const Place& place, const at::Tensor& tensor) {
          const bool is_deferred = find_deferred(tensor) != nullptr;
          (is_deferred ? deferred : real)
              .push_back({place, tensor, writes(place.index)});
        });
  }

  bool writes(size_t index) const {
    const c10::Argument& described = schema.arguments()[index];
    const auto* alias = described.alias_info();
    // Normalization layers update these, and their schemas do not say so.
    const bool is_statistic =
        described.name() == "running_mean" || described.name() == "running_var";
    return (alias != nullptr && alias->isWrite()) ||
        (is_statistic && is_training(schema, arguments));
  }

  /// Null if the operator has no such argument.
  c10::IValue* argument(const char* name) {
    const auto index = schema.argumentIndexWithName(name);
    return index ? &arguments[*index] : nullptr;
  }

  bool is_random() const {
    return op.hasTag(at::Tag::nondeterministic_seeded);
  }

  [[noreturn]] void fail(std::string_view what) const {
    raise({.call = schema.name()}, what);
  }

  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  torch::jit::Stack arguments;
  std::vector<Input> deferred;
  std::vector<Input> real; // with memory, or on meta but not deferred
};

/// Where a tensor is or will be.
at::Device final_device(const at::Tensor& tensor) {
  const Deferred* deferred = find_deferred(tensor);
  return deferred == nullptr ? tensor.device()
                             : deferred->tape->device_of(deferred->id);
}

/// The device that a caller means. A deferred tensor reports the meta device as
/// its own.
at::Device meant_device(
    const Call& call,
    const Tape& tape,
    at::Device requested) {
  if (requested.is_cpu()) {
    return at::kCPU;
  }
  if (requested.is_meta()) {
    const auto devices = tape.devices();
    if (devices.size() > 1) {
      call.fail(
          "this operation asks for the device of a deferred tensor, but there are deferred tensors for several devices. Name the device.");
    }
    return devices.empty() ? requested : devices.front();
  }
  if (!c10::impl::hasDeviceGuardImpl(requested.type()) ||
      c10::impl::VirtualGuardImpl(requested.type()).deviceCount() == 0) {
    call.fail(fmt::format(
        "this operation asks for device {}, but this process has no device of that kind.",
        requested.str()));
  }
  return requested.has_index()
      ? requested
      : c10::impl::VirtualGuardImpl(requested.type()).getDevice();
}

/// Where the results will be: on the requested device, which is written into
/// the arguments with its index, or on that of the other arguments.
at::Device settle_device(Call& call, const Tape& tape) {
  c10::IValue* requested = call.argument("device");
  if (requested != nullptr && requested->isDevice()) {
    const at::Device device = meant_device(call, tape, requested->toDevice());
    *requested = device;
    return device;
  }
  for (const auto* inputs : {&call.deferred, &call.real}) {
    for (const Input& input : *inputs) {
      // Scalars on the CPU follow the others.
      const at::Device device = final_device(input.tensor);
      if (!device.is_cpu() || input.tensor.dim() > 0) {
        return device;
      }
    }
  }
  return at::kCPU;
}

at::Generator generator_of(const Call& call, at::Device device) {
  for (const c10::IValue& value : call.arguments) {
    if (value.isGenerator() && value.toGenerator().defined()) {
      return value.toGenerator();
    }
  }
  return default_generator(device);
}

/// Whether the caller of a factory fills the memory itself, as
/// torch::tensor({...}) does. Such a caller goes below autograd but not below
/// ADInplaceOrView; the factories of torch:: go below both.
bool caller_fills_memory() {
  using c10::impl::tls_is_dispatch_key_excluded;
  return tls_is_dispatch_key_excluded(
             c10::DispatchKey::AutogradFunctionality) &&
      !tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView);
}

/// Whether the result of a call without deferred tensors is to be deferred.
bool is_deferrable_factory(Call& call, const Tape& tape) {
  const c10::IValue* device = call.argument("device");
  const auto& returns = call.schema.returns();
  const bool makes_tensor = returns.size() == 1 &&
      returns.front().type()->kind() == c10::TypeKind::TensorType;
  if (device == nullptr || !makes_tensor || !call.real.empty() ||
      caller_fills_memory() || call.schema.name() == "aten::from_file") {
    return false;
  }
  const c10::IValue* layout = call.argument("layout");
  if (layout != nullptr && layout->isInt() &&
      layout->toLayout() != at::kStrided) {
    return false;
  }
  const bool is_for_meta = device->isDevice() && device->toDevice().is_meta();
  return !is_for_meta || !tape.devices().empty();
}

void check_devices(const Call& call, at::Device device) {
  // On the meta device all devices look the same, and nothing would be moved.
  const bool moves_to_other = call.schema.name() == "aten::type_as" ||
      (call.schema.name() == "aten::to" &&
       call.schema.overload_name() == "other");
  for (const auto* inputs : {&call.deferred, &call.real}) {
    for (const Input& input : *inputs) {
      if (moves_to_other && final_device(input.tensor) != device) {
        call.fail(
            "this operation moves a tensor to the device of another one, and one of them is deferred. Name the device instead.");
      }
    }
  }
}

void check_autocast(const Call& call, at::Device device) {
  const auto type = device.type();
  if (!call.deferred.empty() && at::autocast::is_autocast_enabled(type) &&
      call.op.hasKernelForDispatchKey(
          at::autocast::get_autocast_dispatch_key_from_device_type(type))) {
    call.fail(
        "autocast would choose the dtype of this operator, but autocast is not supported for deferred tensors. Turn it off while the model is constructed.");
  }
}

void check_tape(const Call& call, const Tape& tape) {
  for (const Input& input : call.deferred) {
    if (find_deferred(input.tensor)->tape.get() != &tape) {
      call.fail(
          "these deferred tensors were created on different threads, so they cannot be used together.");
    }
  }
}

/// Refuses arguments that do not go together with deferred tensors.
void check_real(const Call& call) {
  for (const Input& input : call.real) {
    if (input.tensor.is_meta()) {
      call.fail(kUnknownMeta);
    }
    if (input.is_write) {
      call.fail(
          "this operation would write values that depend on a deferred tensor, which has no values yet, to a tensor with memory. Construct the model without DeferredInit, or do this after materialize() or sharding.");
    }
    if (input.tensor.layout() != at::kStrided || input.tensor.is_quantized()) {
      call.fail(
          "deferred tensors cannot be combined with sparse or quantized ones. Do this after materialize() or sharding.");
    }
  }
}

/// A tensor on the meta device and the one with memory that it stands for.
struct Twins {
  at::Tensor meta;
  at::Tensor real;
};

at::Tensor on_meta(const at::Tensor& real) {
  return at::empty_strided(
      real.sizes(),
      real.strides(),
      at::device(at::kMeta).dtype(real.scalar_type()));
}

/// Returns the arguments for the meta device, and adds to `twins` the tensors
/// that stand for those with memory.
torch::jit::Stack meta_arguments(
    Call& call,
    at::Device device,
    std::vector<Twins>& twins) {
  torch::jit::Stack arguments = copy_values(call.arguments);
  const auto set = [&](const char* name, const c10::IValue& value) {
    if (const auto index = call.schema.argumentIndexWithName(name)) {
      arguments[*index] = value;
    }
  };
  const c10::IValue* requested = call.argument("device");
  const bool names_device = requested != nullptr && requested->isDevice();
  if (names_device || call.deferred.empty()) {
    set("device", c10::Device(c10::kMeta));
  }
  set("pin_memory", c10::IValue());
  for (c10::IValue& value : arguments) {
    if (value.isGenerator()) {
      value = c10::IValue();
    }
  }
  // On the meta device, to() finds its argument on the right device and returns
  // it unchanged.
  if (names_device && !call.deferred.empty() &&
      final_device(call.deferred.front().tensor) != device) {
    set("copy", true);
  }
  for (const Input& input : call.real) {
    // Scalars on the CPU go with any device, and some operators read them.
    if (input.tensor.dim() > 0 || !input.tensor.is_cpu()) {
      twins.push_back({on_meta(input.tensor), input.tensor});
      put(arguments, input.place, twins.back().meta);
    }
  }
  return arguments;
}

/// The argument that a result is identical to, as in-place operators return it.
std::optional<size_t> argument_returned(
    const c10::FunctionSchema& schema,
    const c10::Argument& result) {
  const auto* alias = result.alias_info();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite() && other != nullptr &&
        *other == *alias) {
      return i;
    }
  }
  return std::nullopt;
}

/// Whether the results cannot be computed without values.
bool reads_values(const Call& call) {
  for (const c10::Argument& result : call.schema.returns()) {
    const auto kind = result.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) {
      return true;
    }
  }
  return call.op.hasTag(at::Tag::data_dependent_output) ||
      call.op.hasTag(at::Tag::dynamic_output_shape);
}

/// Makes new results require gradients if they do in plain construction. They
/// have no history: backward through them is an error.
void set_broken_history(const Call& call, const std::vector<at::Tensor>& made) {
  bool requires_grad = false;
  for (const auto* inputs : {&call.deferred, &call.real}) {
    for (const Input& input : *inputs) {
      requires_grad = requires_grad || input.tensor.requires_grad();
    }
  }
  if (!requires_grad || !at::GradMode::is_enabled()) {
    return;
  }
  const auto node = make_node<autograd::Error>(
      "gradients do not flow through operators on deferred tensors",
      autograd::edge_list());
  for (const at::Tensor& tensor : made) {
    if (autograd::isDifferentiableType(tensor.scalar_type())) {
      autograd::set_history(tensor, node);
    }
  }
}

/// Results of an operator that has no kernel for the meta device: it is run on
/// memory, with the values that its arguments will have, for their shapes.
torch::jit::Stack results_by_running(Call& call, at::Device device) {
  if (reads_values(call)) {
    call.fail(kNoValues);
  }
  const auto& returns = call.schema.returns();
  std::vector<std::optional<size_t>> returned;
  torch::jit::Stack results;
  for (const c10::Argument& result : returns) {
    returned.push_back(argument_returned(call.schema, result));
    if (returned.back()) {
      results.push_back(call.arguments[*returned.back()]);
    }
  }
  for (const Input& input : call.deferred) {
    if (call.schema.arguments()[input.place.index].is_out()) {
      call.fail(
          "LibTorch has no meta kernel for this operator, so the shape of `out` is unknown. Use the operator that returns a new tensor.");
    }
  }
  if (results.size() == returns.size()) {
    return results; // in place: no shape changes
  }

  results = copy_values(call.arguments);
  std::vector<Twins> twins;
  for (const Input& input : call.deferred) {
    twins.push_back({input.tensor, replay(input.tensor)});
    put(results, input.place, twins.back().real);
  }
  {
    const PlainScope plain;
    GeneratorStates states;
    if (call.is_random()) {
      states.keep(generator_of(call, device));
    }
    call.op.callBoxed(&results);
  }

  std::vector<at::Tensor> made;
  const auto substitute = [&](const Place& place, const at::Tensor& real) {
    if (returned[place.index]) {
      return call.arguments[*returned[place.index]].toTensor();
    }
    for (const Twins& pair : twins) {
      if (real.is_alias_of(pair.real)) {
        return pair.meta.as_strided(
            real.sizes(), real.strides(), real.storage_offset());
      }
    }
    for (const Input& input : call.real) {
      if (real.is_alias_of(input.tensor)) {
        return real;
      }
    }
    made.push_back(on_meta(real));
    return made.back();
  };
  const torch::jit::Stack real_results = copy_values(results);
  for_each_tensor(
      real_results, [&](const Place& place, const at::Tensor& real) {
        put(results, place, substitute(place, real));
      });
  set_broken_history(call, made);
  return results;
}

/// Makes new results deferred, and puts tensors with memory where there are
/// views of their twins. Returns the new ones.
std::vector<Record::Slot> defer_results(
    const Call& call,
    const std::shared_ptr<Tape>& tape,
    at::Device device,
    const std::vector<Twins>& twins,
    torch::jit::Stack& results) {
  std::vector<Record::Slot> outputs;
  const auto settle = [&](const Place& place, const at::Tensor& result) {
    if (find_deferred(result) != nullptr) {
      add_deferred_key(result);
      return;
    }
    if (!result.has_storage() || result.layout() != at::kStrided) {
      call.fail(
          "its result is not a dense tensor, and only dense tensors can be deferred. Do this after materialize() or sharding.");
    }
    for (const Twins& pair : twins) {
      if (result.is_alias_of(pair.meta)) {
        put(results,
            place,
            pair.real.as_strided(
                result.sizes(),
                result.strides(),
                pair.real.storage_offset() + result.storage_offset()));
        return;
      }
    }
    for (const Input& input : call.real) {
      if (result.is_alias_of(input.tensor)) {
        return;
      }
    }
    if (!result.is_meta()) {
      call.fail(kNoValues);
    }
    if (result.is_inference()) {
      call.fail(
          "inference mode is on, and its tensors cannot be deferred. Construct the model outside c10::InferenceMode.");
    }
    defer(result, tape, device);
    outputs.push_back({place, ref_to(result)});
  };
  const torch::jit::Stack original = copy_values(results);
  for_each_tensor(original, settle);
  return outputs;
}

/// A copy that neither the caller nor a replay changes.
at::Tensor freeze(const at::Tensor& tensor) {
  const PlainScope plain;
  const at::Tensor source = tensor.detach();
  const int64_t extent = extent_of(source.sizes(), source.strides());
  at::Tensor copy;
  if (extent > source.numel() || source.is_conj() || source.is_neg()) {
    copy = source.clone();
  } else {
    // Copies the storage as it is: an expanded tensor must not be written out
    // in full.
    copy = source.as_strided({extent}, {1})
               .clone()
               .as_strided(source.sizes(), source.strides(), 0);
  }
  // Scalars that were numbers do not take part in type promotion.
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

/// Records the operator and its arguments. Call it before the operator runs,
/// which may change the shapes of its arguments.
Record begin_record(const Call& call) {
  Record record{.op = call.op};
  record.default_dtype = c10::typeMetaToScalarType(c10::get_default_dtype());
  for (const Input& input : call.deferred) {
    record.inputs.push_back({input.place, ref_to(input.tensor)});
    const StorageId storage = record.inputs.back().tensor.storage;
    auto& writes = record.writes;
    if (input.is_write &&
        std::find(writes.begin(), writes.end(), storage) == writes.end()) {
      writes.push_back(storage);
    }
  }
  return record;
}

void finish_record(Record record, Call& call, at::Device device, Tape& tape) {
  std::optional<at::Generator> generator;
  if (call.is_random()) {
    generator = generator_of(call, device);
  }
  for (const Input& input : call.deferred) {
    put(call.arguments, input.place, at::Tensor());
  }
  for (const Input& input : call.real) {
    put(call.arguments, input.place, freeze(input.tensor));
  }
  record.arguments = std::move(call.arguments);
  tape.append(std::move(record), generator);
}

/// set_() of a deferred tensor to another one. Nothing is computed, so nothing
/// is recorded.
void set_source(Call& call, torch::jit::Stack& stack) {
  const at::Tensor self = call.arguments[0].toTensor();
  const c10::IValue& source = call.arguments[1];
  const PlainScope plain;
  at::Tensor data;
  if (source.isTensor() && call.arguments.size() == 2) {
    data = source.toTensor();
    if (data.is_meta() && find_deferred(data) == nullptr) {
      call.fail(kUnknownMeta);
    }
    if (data.scalar_type() != self.scalar_type()) {
      call.fail("the tensors differ in dtype.");
    }
  } else if (source.isStorage() && !source.toStorage().device().is_meta()) {
    data = at::empty(
        {0}, at::device(source.toStorage().device()).dtype(self.scalar_type()));
    call.arguments[0] = data;
    call.op.callBoxed(&call.arguments);
  } else {
    call.fail(
        "a deferred tensor cannot be set to a storage without memory. Pass a tensor.");
  }
  replace_data(self, data);
  torch::jit::drop(stack, call.schema.arguments().size());
  stack.emplace_back(self);
}

/// Answers the question that set_data() asks before it replaces one tensor with
/// another.
void answer_compatible(const Call& call, torch::jit::Stack& stack) {
  check_real(call);
  torch::jit::drop(stack, call.schema.arguments().size());
  stack.emplace_back(true);
}

/// Loading a file puts memory into tensors that it has just made, without an
/// operator. By their keys they are still deferred, but by their storages they
/// are real.
void repair(const at::Tensor& tensor) {
  if (!tensor.unsafeGetTensorImpl()->key_set().has(kDeferredKey) ||
      !tensor.has_storage() || tensor.storage().device().is_meta()) {
    return;
  }
  const PlainScope plain;
  at::Tensor real = at::empty(
      {0}, at::device(tensor.storage().device()).dtype(tensor.scalar_type()));
  real.set_(
      tensor.storage(),
      tensor.storage_offset(),
      tensor.sizes(),
      tensor.strides());
  replace_data(tensor, real);
}

/// Runs the call on the meta device, and records it if it makes or writes
/// deferred tensors. Puts its results on the stack in place of the arguments.
void run_deferred(
    Call& call,
    const std::shared_ptr<Tape>& tape,
    torch::jit::Stack& stack) {
  const at::Device device = settle_device(call, *tape);
  check_tape(call, *tape);
  check_real(call);
  check_devices(call, device);
  check_autocast(call, device);

  Record record = begin_record(call);
  std::vector<Twins> twins;
  torch::jit::Stack results = meta_arguments(call, device, twins);
  try {
    AllowPointers pointers;
    for (const Input& input : call.deferred) {
      pointers.add(input.tensor.storage());
    }
    call.op.callBoxed(&results);
  } catch (const c10::NotImplementedError&) {
    results = results_by_running(call, device);
  }
  record.outputs = defer_results(call, tape, device, twins, results);
  torch::jit::drop(stack, call.schema.arguments().size());
  stack.insert(stack.end(), results.begin(), results.end());
  if (!record.outputs.empty() || !record.writes.empty()) {
    finish_record(std::move(record), call, device, *tape);
  }
}

/// Runs a call without deferred tensors, made under a guard.
void run_undeferred(Call& call, Tape& tape, torch::jit::Stack& stack) {
  const at::Device device = settle_device(call, tape);
  if (call.is_random() && !device.is_meta()) {
    tape.catch_up(generator_of(call, device));
  }
  torch::jit::drop(stack, call.arguments.size());
  stack.insert(stack.end(), call.arguments.begin(), call.arguments.end());
  call.op.callBoxed(&stack);
}

void record_and_run(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack* stack) {
  const bool in_guard = c10::impl::tls_is_dispatch_key_included(kDeferredKey);
  c10::impl::ExcludeDispatchKeyGuard not_recorded(kDeferredKey);
  for_each_tensor(
      torch::jit::last(*stack, op.schema().arguments().size()),
      [](const Place&, const at::Tensor& tensor) { repair(tensor); });
  Call call(op, *stack);
  if (call.deferred.empty() && !in_guard) {
    op.callBoxed(stack);
  } else if (call.deferred.empty()) {
    const auto tape = current_tape();
    if (is_deferrable_factory(call, *tape)) {
      run_deferred(call, tape, *stack);
    } else {
      run_undeferred(call, *tape, *stack);
    }
  } else if (call.schema.name() == "aten::_has_compatible_shallow_copy_type") {
    answer_compatible(call, *stack);
  } else if (call.schema.name() == "aten::set_" && call.arguments.size() > 1) {
    set_source(call, *stack);
  } else {
    // A copy: the operator may drop the last tensor that holds the tape.
    const auto tape = find_deferred(call.deferred.front().tensor)->tape;
    run_deferred(call, tape, *stack);
  }
}

void refuse_to_pickle_deferred(const at::Tensor& tensor) {
  if (find_deferred(tensor) != nullptr) {
    raise({.call = "torch::save"}, kNoValues);
  }
}

} // namespace

void enable_recording() {
  check_before_pickling(refuse_to_pickle_deferred);
  static std::once_flag once;
  std::call_once(once, [] {
    // Never destroyed: operators may run in static destructors.
    static auto* library = new torch::Library(
        torch::Library::IMPL, "_", kDeferredKey, __FILE__, __LINE__);
    library->fallback(
        torch::CppFunction::makeFromBoxedFunction<&record_and_run>());
  });
}

std::shared_ptr<Tape> current_tape() {
  std::shared_ptr<Tape> tape = thread_tape.lock();
  if (!tape) {
    tape = std::make_shared<Tape>();
    thread_tape = tape;
  }
  return tape;
}

} // namespace tessera::engine
