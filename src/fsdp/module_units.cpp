#include "fsdp/module_units.h"

#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "shard/names.h"

namespace tessera::fsdp {
namespace {

using shard::NamedParam;
using shard::Unit;

struct Remembered {
  std::weak_ptr<const torch::nn::Module> module;
  std::shared_ptr<Unit> unit;
};

/// Never destroyed: modules may die in static destructors.
std::unordered_map<const torch::nn::Module*, Remembered>& remembered() {
  static auto& map =
      *new std::unordered_map<const torch::nn::Module*, Remembered>;
  return map;
}

std::mutex& remembered_mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

std::shared_ptr<Unit> remembered_at(const torch::nn::Module& module) {
  const std::scoped_lock lock(remembered_mutex());
  const auto found = remembered().find(&module);
  return found == remembered().end() || found->second.module.expired()
      ? nullptr
      : found->second.unit;
}

} // namespace

void remember(
    const torch::nn::Module& module,
    const std::shared_ptr<Unit>& unit) {
  const std::scoped_lock lock(remembered_mutex());
  std::erase_if(remembered(), [](const auto& entry) {
    return entry.second.module.expired();
  });
  const auto weak = module.weak_from_this();
  if (!weak.expired()) { // one on the stack cannot be followed
    remembered()[&module] = {weak, unit};
  }
}

std::vector<NamedParam> distinct_parameters(const torch::nn::Module& module) {
  std::vector<NamedParam> result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters(/*recurse=*/true)) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
      result.push_back({shard::clean_name(item.key()), item.value()});
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
    add(shard::unit_of(param.tensor));
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

std::shared_ptr<Unit> unit_at(const torch::nn::Module& module) {
  for (auto& unit : units_in(module)) {
    if (unit->home() == &module) {
      return std::move(unit);
    }
  }
  return nullptr;
}

} // namespace tessera::fsdp
