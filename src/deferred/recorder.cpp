#include "deferred/recorder.h"

#include <tessera/error.h>

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/DefaultDtype.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "deferred/deferred_tensor.h"
#include "deferred/meta_run.h"
#include "deferred/operator_call.h"
#include "libtorch/pickling.h"

namespace tessera::deferred {
namespace {

constexpr const char* kUnknownMeta =
    "this operation combines a deferred tensor with a meta tensor that is not deferred and has no values. Create the meta tensor under DeferredInit too.";

thread_local std::weak_ptr<Tape> thread_tape;

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
bool is_deferrable_factory(OperatorCall& call, const Tape& tape) {
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

void check_devices(const OperatorCall& call, at::Device device) {
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

void check_autocast(const OperatorCall& call, at::Device device) {
  const auto type = device.type();
  if (!call.deferred.empty() && at::autocast::is_autocast_enabled(type) &&
      call.op.hasKernelForDispatchKey(
          at::autocast::get_autocast_dispatch_key_from_device_type(type))) {
    call.fail(
        "autocast would choose the dtype of this operator, but autocast is not supported for deferred tensors. Turn it off while the model is constructed.");
  }
}

void check_tape(const OperatorCall& call, const Tape& tape) {
  for (const Input& input : call.deferred) {
    if (find_deferred(input.tensor)->tape.get() != &tape) {
      call.fail(
          "these deferred tensors were created on different threads, so they cannot be used together.");
    }
  }
}

/// Refuses arguments that do not go together with deferred tensors.
void check_real(const OperatorCall& call) {
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
Record begin_record(const OperatorCall& call) {
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

void finish_record(
    Record record,
    OperatorCall& call,
    at::Device device,
    Tape& tape) {
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
void set_source(OperatorCall& call, torch::jit::Stack& stack) {
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
void answer_compatible(const OperatorCall& call, torch::jit::Stack& stack) {
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
    OperatorCall& call,
    const std::shared_ptr<Tape>& tape,
    torch::jit::Stack& stack) {
  const at::Device device = settle_device(call, *tape);
  check_tape(call, *tape);
  check_real(call);
  check_devices(call, device);
  check_autocast(call, device);

  Record record = begin_record(call);
  MetaResults results = run_on_meta(call, device);
  record.outputs = defer_results(call, tape, device, results);
  torch::jit::drop(stack, call.schema.arguments().size());
  stack.insert(stack.end(), results.values.begin(), results.values.end());
  if (!record.outputs.empty() || !record.writes.empty()) {
    finish_record(std::move(record), call, device, *tape);
  }
}

/// Runs a call without deferred tensors, made under a guard.
void run_undeferred(OperatorCall& call, Tape& tape, torch::jit::Stack& stack) {
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
  OperatorCall call(op, *stack);
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
  libtorch::check_before_pickling(refuse_to_pickle_deferred);
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

} // namespace tessera::deferred
