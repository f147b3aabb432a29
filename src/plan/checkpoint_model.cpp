#include "plan/checkpoint_model.h"

#include <algorithm>
#include <map>
#include <optional>
#include <regex>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/digits.h"
#include "checkpoint/format/format_error.h"
#include "plan/checked.h"
#include "plan/setup.h"

namespace tessera::plan {
namespace {

using checkpoint::StoredTensor;

/// std::regex recurses, and names come from files that anyone may have written.
constexpr size_t kLongestName = 1000;

bool is_below(std::string_view name, std::string_view prefix) {
  return name.size() > prefix.size() && name.starts_with(prefix) &&
      name[prefix.size()] == '.';
}

/// "blocks.7" for "blocks.7.norm.weight"; empty without a numbered list.
std::string numbered_module(std::string_view name) {
  size_t begin = 0;
  for (size_t dot = name.find('.'); dot != std::string_view::npos;
       begin = dot + 1, dot = name.find('.', begin)) {
    if (is_digits(name.substr(begin, dot - begin))) {
      return std::string(name.substr(0, dot));
    }
  }
  return {};
}

/// Finds the unit of a name.
class Grouping {
 public:
  explicit Grouping(const std::string& pattern) {
    if (pattern.empty()) {
      return;
    }
    try {
      regex_.emplace(pattern, std::regex::ECMAScript);
    } catch (const std::regex_error& error) {
      throw PlanError(
          "--unit " + format::in_quotes(pattern) +
          " is not a regular expression (" + error.what() +
          "). Example: 'layers\\.[0-9]+'.");
    }
  }

  std::string unit_of(const std::string& name) const {
    if (!regex_) {
      return numbered_module(name);
    }
    if (name.size() > kLongestName) {
      throw PlanError(
          "the name " + format::in_quotes(name) + " has " +
          std::to_string(name.size()) +
          " characters, too many for a regular expression. Leave --unit out.");
    }
    std::smatch match;
    return std::regex_search(name, match, *regex_) ? match.str() : "";
  }

 private:
  std::optional<std::regex> regex_;
};

/// Units of a list by their numbers: "blocks.10" comes after "blocks.2". The
/// name itself tells "h.1" from "h.01".
using OrderKey = std::tuple<std::string, size_t, std::string, std::string>;

OrderKey order_key(const std::string& unit) {
  const size_t end = unit.find_last_not_of("0123456789") + 1;
  std::string digits = unit.substr(end);
  digits.erase(0, digits.find_first_not_of('0'));
  return {unit.substr(0, end), digits.size(), digits, unit};
}

/// The kinds of units in a model, each once.
class Kinds {
 public:
  size_t number_of(UnitKind kind) {
    std::vector<std::pair<engine::Shape, format::DType>> key;
    for (const Param& param : kind.params) {
      key.emplace_back(param.shape, param.dtype);
    }
    const auto [found, is_new] = numbers_.emplace(key, kinds_.size());
    if (is_new) {
      kinds_.push_back(std::move(kind));
    }
    return found->second;
  }
  std::vector<UnitKind> take() && {
    return std::move(kinds_);
  }

 private:
  std::map<std::vector<std::pair<engine::Shape, format::DType>>, size_t>
      numbers_;
  std::vector<UnitKind> kinds_;
};

/// A unit that is being filled.
struct OpenUnit {
  std::string name;
  UnitKind kind;
  std::vector<std::string> names; // of its parameters, in the checkpoint
};

std::string selected_prefix(
    const checkpoint::Source& source,
    const CheckpointOptions& options) {
  if (!options.select.empty()) {
    return options.select;
  }
  const auto has = [&](const auto& property) {
    return std::any_of(
        source.tensors().begin(), source.tensors().end(), property);
  };
  const bool is_whole_run =
      has([](const auto& one) { return one.name.starts_with("optim"); }) &&
      has([](const auto& one) { return is_below(one.name, "model"); });
  return is_whole_run ? "model" : "";
}

/// The running statistics of a batch norm, which a checkpoint has among the
/// parameters.
bool is_statistic(std::string_view name) {
  const std::string_view last = name.substr(name.rfind('.') + 1);
  return last == "running_mean" || last == "running_var";
}

bool is_trainable(format::DType dtype) {
  return is_floating(dtype) || dtype == format::DType::Complex32 ||
      dtype == format::DType::Complex64 || dtype == format::DType::Complex128;
}

} // namespace

CheckpointModel model_of(
    const checkpoint::Source& source,
    const CheckpointOptions& options) {
  const std::string prefix = selected_prefix(source, options);
  const Grouping grouping(options.unit);
  CheckpointModel result;
  std::map<OrderKey, OpenUnit> units;
  OpenUnit root{.name = "root", .kind = {}, .names = {}};
  std::vector<const StoredTensor*> tied;
  const auto is_selected = [&](const std::string& name) {
    return prefix.empty() || is_below(name, prefix);
  };
  for (const StoredTensor& tensor : source.tensors()) {
    if (!is_selected(tensor.name)) {
      ++result.num_left_out;
      continue;
    }
    if (!tensor.tied_to.empty() && is_selected(tensor.tied_to)) {
      ++result.num_tied;
      tied.push_back(&tensor);
      continue;
    }
    if (tensor.is_buffer || !is_trainable(tensor.dtype) ||
        is_statistic(tensor.name)) {
      ++result.num_buffers;
      result.model.buffer_bytes =
          plus(result.model.buffer_bytes, static_cast<int64_t>(tensor.bytes()));
      continue;
    }
    const std::string name =
        tensor.name.substr(prefix.empty() ? 0 : prefix.size() + 1);
    const std::string unit = grouping.unit_of(name);
    OpenUnit& open = unit.empty() ? root : units[order_key(unit)];
    if (!unit.empty()) {
      open.name = unit;
    }
    open.kind.params.push_back(
        {.name = name, .shape = tensor.sizes, .dtype = tensor.dtype});
    open.names.push_back(tensor.name);
  }
  if (units.empty() && root.kind.params.empty()) {
    throw PlanError(
        "no parameters in " + format::in_quotes(source.path().string()) +
        (prefix.empty() ? "" : " below " + format::in_quotes(prefix)) +
        ". `tessera ckpt inspect` shows its names; --select chooses among them.");
  }
  Kinds kinds;
  const auto close = [&](OpenUnit& unit) {
    for (size_t i = 0; i < unit.names.size(); ++i) {
      result.places.emplace(
          std::move(unit.names[i]),
          ParamPlace{.unit = result.model.units.size(), .param = i});
    }
    const size_t kind = kinds.number_of(std::move(unit.kind));
    result.model.units.push_back({std::move(unit.name), kind});
  };
  for (auto& [key, unit] : units) {
    close(unit);
  }
  close(root);
  for (const StoredTensor* tensor : tied) {
    const auto first = result.places.find(tensor->tied_to);
    if (first != result.places.end()) {
      result.places.emplace(tensor->name, first->second);
    }
  }
  result.model.kinds = std::move(kinds).take();
  result.model.description = source.path().string();
  return result;
}

} // namespace tessera::plan
