#include "deferred/tape.h"

#include <tessera/error.h>

#include <ATen/ops/_conj.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/empty.h>
#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <string_view>
#include <utility>

#include "deferred/deferred_tensor.h"

namespace tessera::deferred {
namespace {

std::atomic<int64_t> live_tapes = 0;

/// Random operators whose use of the generator depends on the shape of their
/// argument alone: to run one only for the generator's sake, any values will
/// do.
constexpr std::array<std::string_view, 13> kDrawByShape = {
    "aten::normal_",
    "aten::uniform_",
    "aten::random_",
    "aten::exponential_",
    "aten::cauchy_",
    "aten::log_normal_",
    "aten::geometric_",
    "aten::rand_like",
    "aten::randn_like",
    "aten::randint_like",
    "aten::dropout",
    "aten::dropout_",
    "aten::native_dropout"};

bool draws_by_shape(const Record& record) {
  return record.inputs.empty() ||
      (record.inputs.size() == 1 &&
       std::find(
           kDrawByShape.begin(),
           kDrawByShape.end(),
           record.op.schema().name()) != kDrawByShape.end());
}

/// The tensor that `ref` names, in memory.
at::Tensor tensor_in(const c10::Storage& storage, const TensorRef& ref) {
  at::Tensor tensor =
      at::empty({0}, at::device(storage.device()).dtype(ref.dtype));
  tensor.set_(storage, ref.offset, ref.sizes, ref.strides);
  if (ref.is_conj) {
    tensor = at::_conj(tensor);
  }
  return ref.is_neg ? at::_neg_view(tensor) : tensor;
}

/// Whether `tensor` lies in its storage as `ref` says.
bool lies_as(const at::Tensor& tensor, const TensorRef& ref) {
  if (tensor.sizes() != at::IntArrayRef(ref.sizes) ||
      tensor.storage_offset() != ref.offset ||
      tensor.scalar_type() != ref.dtype || tensor.is_conj() != ref.is_conj ||
      tensor.is_neg() != ref.is_neg) {
    return false;
  }
  for (int64_t dim = 0; dim < tensor.dim() && tensor.numel() > 0; ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) != ref.strides[dim]) {
      return false;
    }
  }
  return true;
}

c10::Storage laid_out(const at::Tensor& tensor, const TensorRef& ref) {
  const int64_t numel = ref.offset + extent_of(ref.sizes, ref.strides);
  const at::Tensor memory =
      at::empty({numel}, tensor.options().dtype(ref.dtype));
  tensor_in(memory.storage(), ref).copy_(tensor);
  return memory.storage();
}

/// The default dtype is not an argument, but factories and promotion depend on
/// it.
class DefaultDtype {
 public:
  explicit DefaultDtype(at::ScalarType dtype)
      : before_(c10::get_default_dtype()) {
    set(c10::scalarTypeToTypeMeta(dtype));
  }
  ~DefaultDtype() {
    set(before_);
  }
  DefaultDtype(const DefaultDtype&) = delete;
  DefaultDtype& operator=(const DefaultDtype&) = delete;

 private:
  // The default dtype belongs to the process: it is set only if it differs.
  static void set(caffe2::TypeMeta dtype) {
    if (c10::get_default_dtype() != dtype) {
      c10::set_default_dtype(dtype);
    }
  }

  caffe2::TypeMeta before_;
};

} // namespace

PlainScope::PlainScope()
    : not_recorded(kDeferredKey),
      no_autocast(c10::autocast_dispatch_keyset),
      no_inference(false) {}

TensorRef TensorRef::of(const at::Tensor& tensor, StorageId storage) {
  return {
      .storage = storage,
      .sizes = tensor.sizes().vec(),
      .strides = tensor.strides().vec(),
      .offset = tensor.storage_offset(),
      .dtype = tensor.scalar_type(),
      .is_conj = tensor.is_conj(),
      .is_neg = tensor.is_neg()};
}

int64_t extent_of(at::IntArrayRef sizes, at::IntArrayRef strides) {
  int64_t extent = 1;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] == 0) {
      return 0;
    }
    extent += (sizes[dim] - 1) * strides[dim];
  }
  return extent;
}

torch::jit::Stack copy_values(std::span<const c10::IValue> values) {
  torch::jit::Stack copy(values.begin(), values.end());
  for (c10::IValue& value : copy) {
    if (value.isList()) {
      value = value.toList().copy();
    }
  }
  return copy;
}

void put(
    std::span<c10::IValue> values,
    const Place& place,
    const at::Tensor& tensor) {
  if (place.element) {
    values[place.index].toList().set(*place.element, tensor);
  } else {
    values[place.index] = tensor;
  }
}

Tape::Tape() {
  ++live_tapes;
}

Tape::~Tape() {
  --live_tapes;
}

StorageId Tape::add_storage(at::Device device) {
  const MutexLock lock(mutex_);
  storages_.push_back({.device = device, .writers = {}});
  if (std::find(devices_.begin(), devices_.end(), device) == devices_.end()) {
    devices_.push_back(device);
  }
  return storages_.size() - 1;
}

at::Device Tape::device_of(StorageId storage) const {
  const MutexLock lock(mutex_);
  return storages_[storage].device;
}

std::vector<at::Device> Tape::devices() const {
  const MutexLock lock(mutex_);
  return devices_;
}

void Tape::append(
    Record record,
    const std::optional<at::Generator>& generator) {
  const MutexLock lock(mutex_);
  const size_t index = records_.size();
  for (const Record::Slot& output : record.outputs) {
    storages_[output.tensor.storage].writers.push_back(index);
  }
  for (StorageId storage : record.writes) {
    storages_[storage].writers.push_back(index);
  }
  if (generator) {
    record.draw = draws_.note(*generator, index);
  }
  records_.push_back(std::move(record));
}

std::vector<at::Tensor> Tape::replay(std::span<const TensorRef> refs) {
  const MutexLock lock(mutex_);
  const PlainScope plain;
  GeneratorStates states;
  const StorageId storage = refs.front().storage;
  std::vector<size_t> heap;
  push_writer(storage, records_.size(), heap);
  const Memory memory = run(records_for(heap), {&storage, 1}, states);
  std::vector<at::Tensor> tensors;
  for (const TensorRef& ref : refs) {
    TESSERA_INTERNAL_ASSERT(
        ref.storage == storage, "tensors of several storages in one replay");
    tensors.push_back(tensor_in(memory.at(storage), ref));
  }
  return tensors;
}

void Tape::catch_up(const at::Generator& generator) {
  const MutexLock lock(mutex_);
  const auto last = draws_.stood_for(generator);
  if (!last) {
    return;
  }
  {
    const PlainScope plain;
    GeneratorStates states;
    run_missing_draws(*last, states);
    if (!draws_.end(*last).defined()) {
      run_draw(*last, states);
    }
  }
  set_state(generator, draws_.end(*last));
}

/// Adds the last record before `before` that wrote `storage` to a max-heap.
void Tape::push_writer(
    StorageId storage,
    size_t before,
    std::vector<size_t>& heap) const {
  const auto& writers = storages_[storage].writers;
  const auto end = std::lower_bound(writers.begin(), writers.end(), before);
  if (end != writers.begin()) {
    heap.push_back(*std::prev(end));
    std::push_heap(heap.begin(), heap.end());
  }
}

/// The records that have to run, in order, so that those in the heap can run
/// last.
std::vector<size_t> Tape::records_for(std::vector<size_t> heap) const {
  std::vector<size_t> plan;
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end());
    const size_t index = heap.back();
    heap.pop_back();
    if (!plan.empty() && plan.back() == index) {
      continue;
    }
    plan.push_back(index);
    for (const Record::Slot& input : records_[index].inputs) {
      push_writer(input.tensor.storage, index, heap);
    }
  }
  std::reverse(plan.begin(), plan.end());
  return plan;
}

Tape::Memory Tape::run(
    const std::vector<size_t>& plan,
    std::span<const StorageId> keep,
    GeneratorStates& states) {
  const auto is_planned = [&](size_t record) {
    return std::binary_search(plan.begin(), plan.end(), record);
  };
  std::unordered_map<StorageId, size_t> last_use;
  for (size_t index : plan) {
    const Record& record = records_[index];
    // Other draws need memory of their own, so they run before this replay
    // holds any.
    if (record.draw) {
      const auto previous = draws_.previous(*record.draw);
      if (previous && !is_planned(draws_.record(*previous))) {
        run_missing_draws(*record.draw, states);
      }
    }
    for (const auto* slots : {&record.inputs, &record.outputs}) {
      for (const Record::Slot& slot : *slots) {
        last_use[slot.tensor.storage] = index;
      }
    }
  }
  for (StorageId storage : keep) {
    last_use.erase(storage);
  }
  Memory memory;
  for (size_t index : plan) {
    execute(index, memory, states);
    std::erase_if(memory, [&](const auto& entry) {
      const auto last = last_use.find(entry.first);
      return last != last_use.end() && last->second == index;
    });
  }
  return memory;
}

void Tape::run_missing_draws(RngRecord::Id draw, GeneratorStates& states) {
  for (RngRecord::Id missing : draws_.missing_before(draw)) {
    // Another replay may have run it in the meantime.
    if (!draws_.end(missing).defined()) {
      run_draw(missing, states);
    }
  }
}

/// Runs one random operator to learn where it leaves the generator.
void Tape::run_draw(RngRecord::Id draw, GeneratorStates& states) {
  const size_t index = draws_.record(draw);
  const Record& record = records_[index];
  Memory memory;
  if (draws_by_shape(record)) {
    for (const auto& [place, ref] : record.inputs) {
      const at::Tensor any = at::empty(
          {ref.offset + extent_of(ref.sizes, ref.strides)},
          at::device(storages_[ref.storage].device).dtype(ref.dtype));
      memory[ref.storage] = any.storage();
    }
  } else {
    std::vector<size_t> heap;
    std::vector<StorageId> keep;
    for (const Record::Slot& input : record.inputs) {
      push_writer(input.tensor.storage, index, heap);
      keep.push_back(input.tensor.storage);
    }
    memory = run(records_for(heap), keep, states);
  }
  execute(index, memory, states);
}

void Tape::execute(size_t index, Memory& memory, GeneratorStates& states) {
  const Record& record = records_[index];
  const DefaultDtype dtype(record.default_dtype);
  torch::jit::Stack stack = copy_values(record.arguments);
  for (const auto& [place, ref] : record.inputs) {
    put(stack, place, tensor_in(memory.at(ref.storage), ref));
  }
  if (record.draw) {
    const at::Generator& generator = draws_.generator(*record.draw);
    states.keep(generator);
    set_state(generator, draws_.start(*record.draw));
    record.op.callBoxed(&stack);
    draws_.set_end(*record.draw, state_of(generator));
  } else {
    record.op.callBoxed(&stack);
  }
  for (const auto& [place, ref] : record.outputs) {
    const c10::IValue& value = stack[place.index];
    const at::Tensor tensor = place.element
        ? value.toListRef()[*place.element].toTensor()
        : value.toTensor();
    // The result may be an argument itself: a conversion that changes nothing.
    bool is_shared = false;
    for (const auto& [id, storage] : memory) {
      is_shared = is_shared || storage.is_alias_of(tensor.storage());
    }
    for_each_tensor(
        record.arguments, [&](const Place&, const at::Tensor& constant) {
          is_shared = is_shared || constant.is_alias_of(tensor);
        });
    memory[ref.storage] = is_shared || !lies_as(tensor, ref)
        ? laid_out(tensor, ref)
        : tensor.storage();
  }
}

int64_t testing::num_live_tapes() {
  return live_tapes;
}

} // namespace tessera::deferred
