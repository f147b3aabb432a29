#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/MemoryFormat.h>

#include <algorithm>
#include <utility>

#include "base/fnv.h"
#include "deferred/tape.h"

namespace tessera::deferred {
namespace {

std::optional<c10::OperatorHandle> elements_overload(const Record& record) {
  return c10::Dispatcher::singleton().findSchema(
      {record.op.schema().name(), "elements"});
}

/// Whether the record converts one tensor to another dtype or device, element
/// by element.
bool is_conversion(const Record& record) {
  const c10::FunctionSchema& schema = record.op.schema();
  if ((schema.name() != "aten::to" && schema.name() != "aten::_to_copy") ||
      record.inputs.size() != 1 || record.inputs.front().place.index != 0) {
    return false;
  }
  // A format for four dimensions cannot be given to elements in one.
  const auto format = schema.argumentIndexWithName("memory_format");
  return !format || record.arguments[static_cast<size_t>(*format)].isNone() ||
      record.arguments[static_cast<size_t>(*format)].toMemoryFormat() ==
      c10::MemoryFormat::Preserve;
}

at::Tensor convert(const Record& record, const at::Tensor& elements) {
  torch::jit::Stack stack = copy_values(record.arguments);
  put(stack, record.inputs.front().place, elements);
  record.op.callBoxed(&stack);
  return stack.front().toTensor();
}

} // namespace

/// The record that made the tensor, if it made the whole of it and no record
/// before `before` wrote to it again.
const Record* Tape::only_writer(const TensorRef& ref, size_t before) const {
  const auto& writers = storages_[ref.storage].writers;
  const auto end = std::lower_bound(writers.begin(), writers.end(), before);
  if (end - writers.begin() != 1) {
    return nullptr;
  }
  const Record& record = records_[writers.front()];
  const bool made_it = record.outputs.size() == 1 &&
      record.outputs.front().tensor == ref && !record.draw;
  return made_it ? &record : nullptr;
}

std::optional<ReplayedPart> Tape::replay_part(
    const TensorRef& ref,
    int64_t begin,
    int64_t numel) {
  const MutexLock lock(mutex_);
  const PlainScope plain;
  std::vector<const Record*> conversions; // the last one first
  const Record* record = only_writer(ref, records_.size());
  while (record != nullptr && is_conversion(*record)) {
    conversions.push_back(record);
    record = only_writer(
        record->inputs.front().tensor,
        static_cast<size_t>(record - records_.data()));
  }
  const auto op = record != nullptr && record->inputs.empty()
      ? elements_overload(*record)
      : std::nullopt;
  if (!op) {
    return std::nullopt;
  }
  torch::jit::Stack stack = copy_values(record->arguments);
  stack.emplace_back(begin);
  stack.emplace_back(numel);
  op->callBoxed(&stack);
  ReplayedPart part{stack[0].toTensor(), std::nullopt};
  uint64_t digest = kFnvStart;
  for (; !conversions.empty(); conversions.pop_back()) {
    part.elements = convert(*conversions.back(), part.elements);
    digest =
        mix_digest(digest, static_cast<uint64_t>(part.elements.scalar_type()));
  }
  if (!stack[1].isNone()) {
    part.digest_of_whole =
        mix_digest(digest, static_cast<uint64_t>(stack[1].toInt()));
  }
  return part;
}

} // namespace tessera::deferred
