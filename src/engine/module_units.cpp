#include "engine/module_units.h"

#include <tessera/error.h>

#include <unordered_map>
#include <unordered_set>

#include "base/mutex.h"
#include "engine/names.h"
#include "engine/schedule.h"

namespace tessera::engine {
namespace {

struct Remembered {
  std::weak_ptr<const torch::nn::Module> module;
  std::shared_ptr<Unit> unit;
};

struct RememberedUnits {
  Mutex mutex;
  std::unordered_map<const torch::nn::Module*, Remembered> by_module
      TESSERA_GUARDED_BY(mutex);
};

/// Never destroyed: modules may die in static destructors.
RememberedUnits& remembered() {
  static auto& instance = *new RememberedUnits;
  return instance;
}

std::shared_ptr<Unit> remembered_at(const torch::nn::Module& module) {
  RememberedUnits& all = remembered();
  const MutexLock lock(all.mutex);
  const auto found = all.by_module.find(&module);
  return found == all.by_module.end() || found->second.module.expired()
      ? nullptr
      : found->second.unit;
}

} // namespace

void remember(
    const torch::nn::Module& module,
    const std::shared_ptr<Unit>& unit) {
  RememberedUnits& all = remembered();
  const MutexLock lock(all.mutex);
  std::erase_if(all.by_module, [](const auto& entry) {
    return entry.second.module.expired();
  });
  const auto weak = module.weak_from_this();
  if (!weak.expired()) { // a module on the stack cannot be tracked
    all.by_module[&module] = {weak, unit};
  }
}

std::vector<NamedParam> distinct_parameters(const torch::nn::Module& module) {
  std::vector<NamedParam> result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters(/*recurse=*/true)) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
      result.push_back({engine::clean_name(item.key()), item.value()});
    }
  }
  return result;
}

std::vector<std::shared_ptr<Unit>> units_in(const torch::nn::Module& module) {
  std::vector<std::shared_ptr<Unit>> found;
  std::unordered_set<const Unit*> seen;
  std::unordered_map<const void*, std::shared_ptr<Unit>> by_home;
  const auto add = [&](Unit* unit) {
    if (unit != nullptr && seen.insert(unit).second) {
      found.push_back(unit->shared_from_this());
      by_home.emplace(unit->home(), found.back());
    }
  };
  for (const NamedParam& param : distinct_parameters(module)) {
    add(engine::unit_of(param.tensor));
  }
  std::vector<std::shared_ptr<Unit>> result;
  std::unordered_set<const Unit*> placed;
  const auto place = [&](const std::shared_ptr<Unit>& unit) {
    if (placed.insert(unit.get()).second) {
      result.push_back(unit);
    }
  };
  const auto visit = [&](const torch::nn::Module& one) {
    add(remembered_at(one).get());
    if (const auto home = by_home.find(&one); home != by_home.end()) {
      place(home->second);
    }
  };
  visit(module);
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    visit(*item.value());
  }
  for (const auto& unit : found) {
    place(unit);
  }
  return result;
}

std::vector<std::shared_ptr<Unit>> units_not_summoned(
    const torch::nn::Module& module,
    std::string_view call) {
  auto units = units_in(module);
  for (const auto& unit : units) {
    if (unit->state() == UnitState::Summoned) {
      raise(
          {.call = call, .unit = unit->name()},
          "its parameters are summoned. Close the guard first.");
    }
  }
  return units;
}

void reshard_units(const torch::nn::Module& module, std::string_view call) {
  for (const auto& unit : units_not_summoned(module, call)) {
    unit->schedule().reshard(*unit);
  }
}

std::shared_ptr<Unit> unit_at(const torch::nn::Module& module) {
  for (auto& unit : units_in(module)) {
    if (unit->home() == &module) {
      return std::move(unit);
    }
  }
  return nullptr;
}

} // namespace tessera::engine
