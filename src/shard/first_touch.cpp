#include "shard/first_touch.h"

#include <tessera/error.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>

#include "shard/schedule.h"
#include "shard/unit.h"

namespace tessera::shard {
namespace {

using Units = c10::SmallVector<Unit*, 4>;

[[noreturn]] void refuse_write(const Unit& unit, const std::string& operation) {
  raise(
      {.call = operation, .unit = unit.name()},
      "this writes to a sharded parameter, and the write would be lost at the next reshard. Change the shards that tessera::parameters(module) gives, or change the parameters before fully_shard.");
}

/// Adds the unit that `tensor` belongs to, if it is a face or a view of one.
void collect(
    const at::Tensor& tensor,
    bool is_write,
    const c10::OperatorHandle& op,
    Units& units) {
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
          {.call = op.schema().name()},
          "this parameter belonged to a sharded model that no longer exists.");
    }
    return;
  }
  if (owner.is_shard) {
    if (is_write) {
      owner.unit->count_write(storage);
    }
    return;
  }
  if (is_write) {
    refuse_write(*owner.unit, op.schema().name());
  }
  if (std::find(units.begin(), units.end(), owner.unit) == units.end()) {
    units.push_back(owner.unit);
  }
}

void collect_all(
    const c10::OperatorHandle& op,
    const torch::jit::Stack& stack,
    Units& units) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = stack[first + i];
    const auto* alias = arguments[i].alias_info();
    const bool is_write = alias != nullptr && alias->isWrite();
    if (value.isTensor()) {
      collect(value.toTensor(), is_write, op, units);
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor()) {
          collect(element.toTensor(), is_write, op, units);
        }
      }
    }
  }
}

/// An operator may mix models over different groups: one schedule at a time.
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

void fallback(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  Units units;
  collect_all(op, *stack, units);
  if (!units.empty()) {
    touch_by_schedule(std::move(units));
  }
  c10::impl::ExcludeDispatchKeyGuard without_key(kShardKey);
  const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, kShardKey);
  op.redispatchBoxed(keys & below, stack);
}

} // namespace

void enable_first_touch() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Never destroyed: operators may run in static destructors.
    static auto* library = new torch::Library(
        torch::Library::IMPL, "_", kShardKey, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  });
}

} // namespace tessera::shard
