#include "deferred/rng_record.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <mutex>
#include <span>

#include "base/fnv.h"
#include "base/mutex.h"
#include "deferred/deferred_tensor.h"

namespace tessera::deferred {
namespace {

/// How far the offset of a counter-based generator is advanced: past anything
/// that an operator draws.
constexpr uint64_t kLeap = uint64_t{1} << 40;

/// The streams must be the same on all ranks, so std::hash cannot be
/// used.
uint64_t fingerprint(const at::Tensor& state) {
  uint64_t hash = kFnvStart;
  for (uint8_t byte : std::span(
           state.const_data_ptr<uint8_t>(),
           static_cast<size_t>(state.numel()))) {
    hash = mix_digest(hash, uint64_t{byte});
  }
  return hash;
}

/// Moves the generator to another stream, which depends only on `seed`. The
/// seed that it reports stays the same.
void leap(at::Generator& generator, uint64_t seed) {
  const std::lock_guard lock(generator.mutex());
  if (!generator.device().is_cpu()) {
    generator.set_offset(generator.get_offset() + kLeap);
    return;
  }
  auto* cpu = generator.get<at::CPUGeneratorImpl>();
  // The engine takes 32 bits of a seed; the others are needed too, or states
  // would meet again after some ten thousand draws.
  at::mt19937 engine(seed);
  at::mt19937_data_pod data = engine.data();
  data.state_[1] ^= static_cast<uint32_t>(seed >> 32);
  data.seed_ = cpu->engine().seed();
  engine.set_data(data);
  cpu->set_engine(engine);
  cpu->set_next_float_normal_sample(std::nullopt);
  cpu->set_next_double_normal_sample(std::nullopt);
}

/// Where the last draws of destroyed tapes ended, for each device's own
/// generator: a model that is built after another was sharded continues from
/// there.
class LastEnds {
 public:
  static LastEnds& instance() {
    // Never destroyed: tapes may die in static destructors.
    static auto& ends = *new LastEnds;
    return ends;
  }

  void put(const at::Generator& generator, uint64_t stand_in, at::Tensor end) {
    const MutexLock lock(mutex_);
    ends_[generator.device()] = {stand_in, std::move(end)};
  }

  at::Tensor find(const at::Generator& generator, uint64_t stand_in) {
    const MutexLock lock(mutex_);
    const auto found = ends_.find(generator.device());
    return found != ends_.end() && found->second.first == stand_in
        ? found->second.second
        : at::Tensor();
  }

 private:
  Mutex mutex_;
  std::unordered_map<at::Device, std::pair<uint64_t, at::Tensor>> ends_
      TESSERA_GUARDED_BY(mutex_);
};

} // namespace

RngRecord::~RngRecord() {
  std::vector<const c10::GeneratorImpl*> seen;
  for (const Draw& draw : draws_) {
    const auto* impl = draw.generator.unsafeGetGeneratorImpl();
    if (!draw.is_default ||
        std::find(seen.begin(), seen.end(), impl) != seen.end()) {
      continue;
    }
    seen.push_back(impl);
    try {
      const auto last = stood_for(draw.generator);
      if (last && draws_[*last].end.defined()) {
        LastEnds::instance().put(
            draw.generator,
            fingerprint(state_of(draw.generator)),
            draws_[*last].end);
      }
    } catch (const std::exception&) {
      // The device is shutting down. Nothing is built after that.
    }
  }
}

RngRecord::Id RngRecord::note(at::Generator generator, size_t record) {
  const at::Tensor state = state_of(generator);
  const uint64_t found = fingerprint(state);
  Draw draw{.generator = generator, .record = record};
  draw.is_default = generator == default_generator(generator.device());
  const auto stand_in = stand_ins_.find(found);
  if (stand_in != stand_ins_.end()) {
    draw.previous = stand_in->second;
  } else {
    const at::Tensor end = LastEnds::instance().find(generator, found);
    draw.start = end.defined() ? end : state;
  }
  const Id id = draws_.size();
  leap(generator, found);
  stand_ins_[fingerprint(state_of(generator))] = id;
  draws_.push_back(std::move(draw));
  return id;
}

std::optional<RngRecord::Id> RngRecord::stood_for(
    const at::Generator& generator) const {
  const auto found = stand_ins_.find(fingerprint(state_of(generator)));
  return found == stand_ins_.end() ? std::nullopt
                                   : std::optional<Id>(found->second);
}

std::vector<RngRecord::Id> RngRecord::missing_before(Id draw) const {
  std::vector<Id> missing;
  auto before = draws_[draw].previous;
  while (before && !draws_[*before].end.defined()) {
    missing.push_back(*before);
    before = draws_[*before].previous;
  }
  std::reverse(missing.begin(), missing.end());
  return missing;
}

at::Tensor RngRecord::start(Id draw) const {
  const auto& before = draws_[draw].previous;
  return before ? draws_[*before].end : draws_[draw].start;
}

at::Generator default_generator(at::Device device) {
  return at::globalContext().defaultGenerator(device);
}

at::Tensor state_of(const at::Generator& generator) {
  c10::impl::ExcludeDispatchKeyGuard not_deferred(kDeferredKey);
  at::Generator locked = generator;
  const std::lock_guard lock(locked.mutex());
  return locked.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  c10::impl::ExcludeDispatchKeyGuard not_deferred(kDeferredKey);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

GeneratorStates::~GeneratorStates() {
  for (const auto& [generator, state] : states_) {
    set_state(generator, state);
  }
}

void GeneratorStates::keep(const at::Generator& generator) {
  for (const auto& [kept, state] : states_) {
    if (kept == generator) {
      return;
    }
  }
  states_.emplace_back(generator, state_of(generator));
}

} // namespace tessera::deferred
