#include <tessera/error.h>
#include <tessera/train/averaged_model.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <ATen/ops/scalar_tensor.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/mutex.h"
#include "comm/group/all_or_none.h"
#include "libtorch/recording.h"
#include "train/averages.h"
#include "transfer/model_params.h"
#include "transfer/state_entries.h"

namespace tessera {
namespace {

constexpr const char* kAveraged = "AveragedModel";
constexpr const char* kCount = "n_averaged";
constexpr const char* kModulePrefix = "module.";

bool is_alias(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() == b.numel() &&
      (a.numel() == 0 ||
       (a.is_alias_of(b) && a.storage_offset() == b.storage_offset()));
}

/// Whether two values have the same memory. A rank without elements cannot
/// tell, so it says yes.
bool is_alias(const StateValue& a, const StateValue& b) {
  if (a.is_tensor() && b.is_tensor()) {
    return is_alias(a.tensor(), b.tensor());
  }
  if (!a.is_sharded() || !b.is_sharded()) {
    return false;
  }
  const auto& left = a.sharded().pieces();
  const auto& right = b.sharded().pieces();
  return left.size() == right.size() &&
      std::equal(
             left.begin(),
             left.end(),
             right.begin(),
             [](const auto& one, const auto& other) {
               return is_alias(one.tensor, other.tensor);
             });
}

int64_t count_in(const StateDict& state) {
  const StateValue& value = state.at(kCount);
  return value.is_tensor() ? value.tensor().item<int64_t>() : value.to_int();
}

void check_is_own(const StateDict& own, const StateDict& state) {
  for (const auto& [key, value] : own) {
    const StateValue* given = state.find(key);
    if (given == nullptr || !is_alias(value, *given)) {
      raise<c10::ValueError>(
          {.call = kAveraged, .parameter = key.text()},
          "the dictionary is one of state_dict() in which this value was replaced or removed. Pass all of that dictionary, or a clone() of it with new values.");
    }
  }
}

/// The values under the model's own names, none of which changes while the
/// averages are in the model's place.
StateDict values_to_write(const StateDict& own, const StateDict& state) {
  const std::string prefix = kModulePrefix;
  StateDict values;
  for (const auto& [key, value] : state) {
    if (key == StateKey(kCount)) {
      continue;
    }
    if (key.is_id() || !key.name().starts_with(prefix)) {
      raise<c10::ValueError>(
          {.call = kAveraged},
          fmt::format(
              "the dictionary has the key \"{}\". Keys are \"n_averaged\", and \"module.\" with a name of the model.",
              key.text()));
    }
    const StateValue* mine = own.find(key);
    const bool is_mine = mine != nullptr && is_alias(*mine, value);
    values.set(
        key.name().substr(prefix.size()), is_mine ? value.clone() : value);
  }
  return values;
}

/// The models of this process that have averages in the place of their own
/// values, whichever AveragedModel put them there. Thread-safe.
class ModelsWithAverages {
 public:
  static bool has(const torch::nn::Module& model) {
    Models& all = models();
    const MutexLock lock(all.mutex);
    return all.with_averages.contains(&model);
  }
  static void set(const torch::nn::Module& model, bool has_averages) {
    Models& all = models();
    const MutexLock lock(all.mutex);
    if (has_averages) {
      all.with_averages.insert(&model);
    } else {
      all.with_averages.erase(&model);
    }
  }

 private:
  struct Models {
    Mutex mutex;
    std::unordered_set<const torch::nn::Module*> with_averages
        TESSERA_GUARDED_BY(mutex);
  };
  static Models& models() {
    static Models instance;
    return instance;
  }
};

} // namespace

class AveragedModel::Impl {
 public:
  Impl(torch::nn::Module& model, AveragedModelOptions options)
      : model_(model), averages_(model, std::move(options)) {
    transfer::ModelParams(model_, kAveraged); // refuses summoned parameters
  }

  int64_t count() const {
    return count_.item<int64_t>();
  }

  bool is_swapped_in() const {
    return is_swapped_in_;
  }

  ~Impl() {
    if (is_swapped_in_) {
      ModelsWithAverages::set(model_, false);
    }
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void update() {
    check("update_parameters");
    check_own_values("update_parameters");
    averages_.update(count());
    count_.fill_(count() + 1);
  }

  void swap_in() {
    check("swap_in");
    check_own_values("swap_in");
    averages_.exchange();
    is_swapped_in_ = true;
    ModelsWithAverages::set(model_, true);
  }

  void swap_out() {
    averages_.exchange();
    is_swapped_in_ = false;
    ModelsWithAverages::set(model_, false);
  }

  StateDict state_dict() {
    check("state_dict");
    const transfer::ModelParams params(model_, kAveraged);
    std::unordered_map<const c10::TensorImpl*, const transfer::ModelParam*>
        by_face;
    for (const transfer::ModelParam& param : params.all()) {
      by_face.emplace(param.face.unsafeGetTensorImpl(), &param);
    }
    std::unordered_map<const c10::TensorImpl*, at::Tensor> averages;
    for (const auto* items : {&averages_.params(), &averages_.buffers()}) {
      for (const train::Average& item : *items) {
        averages.emplace(item.current.unsafeGetTensorImpl(), item.average);
      }
    }
    StateDict state{{kCount, count_}};
    for (const auto& entry : transfer::state_entries(model_)) {
      const std::string key = kModulePrefix + entry.name;
      const auto* face = entry.tensor.unsafeGetTensorImpl();
      if (entry.is_buffer) {
        state.set(key, StateValue::of_any_rank(averages.at(face)));
        continue;
      }
      const transfer::ModelParam& param = *by_face.at(face);
      const at::Tensor& average = averages.at(param.leaf.unsafeGetTensorImpl());
      state.set(
          key,
          param.is_sharded() ? StateValue(param.sharded(param.part_of(average)))
                             : StateValue(average));
    }
    return state;
  }

  void load(const StateDict& state) {
    const StateDict own = state_dict();
    const transfer::ModelParams params(model_, kAveraged);
    bool is_own = false;
    int64_t count = 0;
    StateDict values;
    comm::all_or_none(params.groups(), kAveraged, [&] {
      count = count_in(state);
      is_own = state.at(kCount).is_tensor() &&
          is_alias(state.at(kCount).tensor(), count_);
      if (is_own) {
        check_is_own(own, state);
      } else {
        values = values_to_write(own, state);
      }
    });
    if (is_own) {
      return; // the checkpoint was loaded in place
    }
    // What writes state into models of any sharding writes into this model,
    // while the averages are in the place of its values.
    swap_in();
    try {
      set_model_state_dict(model_, values);
    } catch (...) {
      swap_out();
      throw;
    }
    swap_out();
    count_.fill_(count);
  }

 private:
  void check(const char* function) const {
    const std::string call = fmt::format("AveragedModel::{}", function);
    if (is_swapped_in_) {
      raise(
          {.call = call},
          "the averages are in the model, and the model's own values are here. Close the scope of swap_in() first.");
    }
    averages_.check_same_tensors();
  }

  void check_own_values(const char* function) const {
    if (ModelsWithAverages::has(model_)) {
      raise(
          {.call = fmt::format("AveragedModel::{}", function)},
          "another AveragedModel has its averages in the model. Close the scope of its swap_in() first.");
    }
  }

  torch::nn::Module& model_;
  train::Averages averages_;
  at::Tensor count_ = at::scalar_tensor(0, at::TensorOptions(at::kLong));
  bool is_swapped_in_ = false;
};

AveragedModel::AveragedModel(ModuleRef model, AveragedModelOptions options)
    : impl_(std::make_unique<Impl>(model, std::move(options))) {}

AveragedModel::~AveragedModel() = default;

void AveragedModel::update_parameters() {
  libtorch::refuse_in_recording(
      "AveragedModel::update_parameters", "Call it after the captured step.");
  impl_->update();
}

int64_t AveragedModel::n_averaged() const {
  return impl_->count();
}

SwappedAverages AveragedModel::swap_in() {
  impl_->swap_in();
  return SwappedAverages(*this);
}

bool AveragedModel::is_swapped_in() const {
  return impl_->is_swapped_in();
}

StateDict AveragedModel::state_dict() {
  return impl_->state_dict();
}

void AveragedModel::load_state_dict(const StateDict& state) {
  impl_->load(state);
}

SwappedAverages::SwappedAverages(SwappedAverages&& other) noexcept
    : owner_(std::exchange(other.owner_, nullptr)) {}

SwappedAverages::~SwappedAverages() {
  try {
    close();
  } catch (const std::exception& error) {
    TORCH_WARN(
        "averages could not be swapped out, and the model may still have them: ",
        error.what());
  }
}

void SwappedAverages::close() {
  if (owner_ != nullptr) {
    owner_->impl_->swap_out(); // may throw, and be tried again
    owner_ = nullptr;
  }
}

} // namespace tessera
