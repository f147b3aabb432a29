#include "deferred/operator_call.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include "deferred/deferred_tensor.h"

namespace tessera::deferred {
namespace {

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

/// The device that a caller means. A deferred tensor reports the meta device as
/// its own.
at::Device meant_device(
    const OperatorCall& call,
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

} // namespace

OperatorCall::OperatorCall(
    const c10::OperatorHandle& operation,
    const torch::jit::Stack& stack)
    : op(operation), schema(op.schema()) {
  const size_t count = schema.arguments().size();
  arguments = copy_values({stack.data() + (stack.size() - count), count});
  for_each_tensor(arguments, [&](const Place& place, const at::Tensor& tensor) {
    const bool is_deferred = find_deferred(tensor) != nullptr;
    (is_deferred ? deferred : real)
        .push_back({place, tensor, writes(place.index)});
  });
}

bool OperatorCall::writes(size_t index) const {
  const c10::Argument& described = schema.arguments()[index];
  const auto* alias = described.alias_info();
  // Normalization layers update these, and their schemas do not say so.
  const bool is_statistic =
      described.name() == "running_mean" || described.name() == "running_var";
  return (alias != nullptr && alias->isWrite()) ||
      (is_statistic && is_training(schema, arguments));
}

at::Device final_device(const at::Tensor& tensor) {
  const Deferred* deferred = find_deferred(tensor);
  return deferred == nullptr ? tensor.device()
                             : deferred->tape->device_of(deferred->id);
}

at::Device settle_device(OperatorCall& call, const Tape& tape) {
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

at::Generator generator_of(const OperatorCall& call, at::Device device) {
  for (const c10::IValue& value : call.arguments) {
    if (value.isGenerator() && value.toGenerator().defined()) {
      return value.toGenerator();
    }
  }
  return default_generator(device);
}

} // namespace tessera::deferred
