#include "train/captured/tape.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace tessera::testing {
namespace {

/// Below autograd, and nobody's in a program without Python.
constexpr c10::DispatchKey kTapeKey = c10::DispatchKey::Fake;

using Stack = torch::jit::Stack;

/// Keeps what is taken or given back while a tape records.
class TapeMemory : public c10::Allocator {
 public:
  using Blocks = std::map<void*, c10::DataPtr>;

  explicit TapeMemory(c10::Allocator& base) : base_(base) {}

  static TapeMemory& instance() {
    static auto& memory = *new TapeMemory(*c10::GetAllocator(c10::kCPU));
    return memory;
  }

  /// Null: nobody records.
  void record_to(Blocks* recorded) {
    const std::scoped_lock lock(mutex_);
    recorded_ = recorded;
  }
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr block = base_.allocate(bytes);
    void* memory = block.get();
    const std::scoped_lock lock(mutex_);
    if (memory != nullptr) {
      (recorded_ != nullptr ? *recorded_ : blocks_)
          .insert_or_assign(memory, std::move(block));
    }
    return {memory, memory, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  static void give_back(void* memory) {
    TapeMemory& self = instance();
    c10::DataPtr block; // given back without the lock
    const std::scoped_lock lock(self.mutex_);
    auto found = self.blocks_.extract(memory);
    if (found.empty()) {
      return; // a tape's
    }
    if (self.recorded_ != nullptr) {
      self.recorded_->insert(std::move(found));
    } else {
      block = std::move(found.mapped());
    }
  }

  c10::Allocator& base_;
  std::mutex mutex_; // guards what follows
  Blocks blocks_; // of nobody's tape
  Blocks* recorded_ = nullptr;
};

at::Tensor alias_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu() || tensor.numel() == 0) {
    return tensor;
  }
  at::Tensor alias = at::from_blob(
      const_cast<void*>(tensor.const_data_ptr()),
      tensor.sizes(),
      tensor.strides(),
      at::TensorOptions().dtype(tensor.scalar_type()));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return alias;
}

c10::IValue alias_of(const c10::IValue& value) {
  if (value.isTensor()) {
    return alias_of(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> aliases;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      aliases.push_back(alias_of(tensor));
    }
    return aliases;
  }
  if (value.isList()) {
    auto aliases = c10::impl::GenericList(value.toList().elementType());
    for (const c10::IValue& element : value.toListRef()) {
      aliases.push_back(alias_of(element));
    }
    return aliases;
  }
  return value;
}

template <class See>
void for_each_tensor(const c10::IValue& value, const See& see) {
  if (value.isTensor() && value.toTensor().defined()) {
    see(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      for_each_tensor(element, see);
    }
  }
}

/// Batch norm writes its statistics though its schema does not say so.
bool is_written(
    const c10::FunctionSchema& schema,
    const c10::Argument& argument) {
  return (argument.alias_info() != nullptr &&
          argument.alias_info()->isWrite()) ||
      (schema.name() == "aten::native_batch_norm" &&
       argument.name().starts_with("running_"));
}

class Tape : public train::StepGraph {
 public:
  ~Tape() override {
    stop();
    // As with a CUDA graph, tensors may outlive it: their memory is not given
    // to others. (It is kept for good: a test has few tapes.)
    // NOLINTNEXTLINE(bugprone-unhandled-exception-at-new): then the test ends
    static auto& kept = *new std::vector<TapeMemory::Blocks>;
    kept.push_back(std::move(blocks_));
  }

  c10::Device device() const override {
    return c10::kCPU;
  }
  uint64_t random_position() const override {
    const at::Tensor state = generator().get_state();
    return std::hash<std::string_view>()(
        {static_cast<const char*>(state.const_data_ptr()),
         static_cast<size_t>(state.numel())});
  }

  void begin() override {
    generator_before_ = generator().get_state();
    current = this;
    TapeMemory::instance().record_to(&blocks_);
    key_.emplace(kTapeKey);
  }
  void end() override {
    stop();
    rewind();
  }
  void abandon() noexcept override {
    if (generator_before_.defined()) {
      stop();
      rewind();
    }
  }

  void replay() override {
    const at::NoGradGuard no_grad;
    for (const Call& call : calls_) {
      if (!call.op) {
        call.collective();
        continue;
      }
      Stack stack = call.arguments;
      call.op->callBoxed(stack);
      for (size_t i = 0; i < call.results.size(); ++i) {
        copy(call.results[i], stack[i]);
      }
    }
  }

  bool note(const std::function<void()>& collective) override {
    calls_.push_back({.collective = collective});
    return true;
  }

  void note_operator(
      const c10::OperatorHandle& op,
      c10::DispatchKeySet keys,
      Stack& stack) {
    refuse_reads(op);
    const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, kTapeKey);
    const auto& schema = op.schema();
    const size_t first = stack.size() - schema.arguments().size();
    Call call{.op = op};
    bool writes = false;
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      if (is_written(schema, schema.arguments()[i])) {
        writes = writes || schema.is_mutable();
        for_each_tensor(
            stack[first + i], [&](const at::Tensor& tensor) { keep(tensor); });
      }
      call.arguments.push_back(alias_of(stack[first + i]));
    }
    op.redispatchBoxed(keys & below, &stack);
    if (writes) {
      calls_.push_back(std::move(call));
      return;
    }
    const auto& returns = schema.returns();
    const bool is_view = std::any_of(
        returns.begin(), returns.end(), [](const c10::Argument& result) {
          return result.alias_info() != nullptr;
        });
    if (is_view || is_without_values(op)) {
      return;
    }
    for (const c10::IValue& result : stack) {
      call.results.push_back(alias_of(result));
    }
    calls_.push_back(std::move(call));
  }

  static Tape* current; // that records

 private:
  struct Call {
    std::optional<c10::OperatorHandle> op; // none: a collective
    Stack arguments;
    Stack results; // where to put them; empty where arguments are written
    std::function<void()> collective;
  };
  struct Kept {
    char* memory;
    std::string bytes;
  };

  static at::Generator generator() {
    return at::globalContext().defaultGenerator(c10::kCPU);
  }

  static bool is_without_values(const c10::OperatorHandle& op) {
    const std::string& name = op.schema().name();
    return name.starts_with("aten::empty") ||
        name.starts_with("aten::new_empty");
  }

  static void refuse_reads(const c10::OperatorHandle& op) {
    static const std::set<std::string> reads{
        "aten::_local_scalar_dense",
        "aten::equal",
        "aten::is_nonzero",
        "aten::nonzero"};
    TORCH_CHECK(
        !reads.contains(op.schema().name()),
        "operation not permitted when stream is capturing");
  }

  static void copy(const c10::IValue& to, const c10::IValue& from) {
    if (to.isTensor() && to.toTensor().defined()) {
      to.toTensor().copy_(from.toTensor());
    } else if (to.isList()) {
      for (size_t i = 0; i < to.toListRef().size(); ++i) {
        copy(to.toListRef()[i], from.toListRef()[i]);
      }
    }
  }

  /// Keeps the bytes of memory that is about to be written.
  void keep(const at::Tensor& tensor) {
    if (!tensor.is_cpu() || tensor.numel() == 0) {
      return;
    }
    size_t span = 1;
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      span += static_cast<size_t>((tensor.size(d) - 1) * tensor.stride(d));
    }
    auto* memory =
        const_cast<char*>(static_cast<const char*>(tensor.const_data_ptr()));
    kept_.push_back(
        {memory, std::string(memory, span * tensor.element_size())});
  }

  void stop() {
    if (current == this) {
      key_.reset();
      TapeMemory::instance().record_to(nullptr);
      current = nullptr;
    }
  }

  void rewind() {
    for (auto kept = kept_.rbegin(); kept != kept_.rend(); ++kept) {
      std::memcpy(kept->memory, kept->bytes.data(), kept->bytes.size());
    }
    kept_.clear();
    generator().set_state(std::exchange(generator_before_, at::Tensor()));
  }

  TapeMemory::Blocks blocks_;
  std::vector<Call> calls_;
  std::vector<Kept> kept_; // in the order of the writes
  at::Tensor generator_before_;
  std::optional<c10::impl::IncludeDispatchKeyGuard> key_;
};

Tape* Tape::current = nullptr;

void fallback(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard once(kTapeKey);
  Tape::current->note_operator(op, keys, *stack);
}

class TapeDevice : public train::GraphDevice {
 public:
  c10::Device device() const override {
    return c10::kCPU;
  }
  std::unique_ptr<train::StepGraph> make_graph() override {
    return std::make_unique<Tape>();
  }
  uint64_t epoch() const override {
    return 0;
  }
  void on_recording_stream(const std::function<void()>& work) override {
    work();
  }
};

} // namespace

Tapes::Tapes() {
  static std::once_flag once;
  std::call_once(once, [] {
    static auto* library = new torch::Library(
        torch::Library::IMPL, "_", kTapeKey, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
    c10::SetAllocator(c10::kCPU, &TapeMemory::instance(), /*priority=*/255);
  });
  train::set_graph_devices_for_tests(
      [](c10::Device) { return std::make_unique<TapeDevice>(); });
}

Tapes::~Tapes() {
  train::set_graph_devices_for_tests({});
}

} // namespace tessera::testing
