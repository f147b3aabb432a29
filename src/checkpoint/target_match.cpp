#include "checkpoint/target_match.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>

#include "checkpoint/error_lines.h"
#include "checkpoint/state_leaves.h"
#include "checkpoint/values.h"
#include "comm/raw_access.h"
#include "state/describe.h"
#include "state/nearest.h"
#include "state/part_of.h"

namespace tessera::checkpoint {
namespace {

std::string describe(const StoredTensor& tensor) {
  return fmt::format(
      "{} [{}]",
      format::info(tensor.dtype).torch_name,
      fmt::join(tensor.sizes, ", "));
}

std::string dtype_name(at::ScalarType dtype) {
  const auto known = to_format(dtype);
  return std::string(
      known ? format::info(*known).torch_name : c10::toString(dtype));
}

/// A hint for a missing name: the same name with a prefix, or a name with a
/// similar spelling.
std::string hint(
    const std::string& name,
    const std::vector<std::string>& unexpected,
    const std::vector<std::string>& stored) {
  for (const std::string& other : stored) {
    if (other.ends_with("." + name)) {
      return fmt::format(
          " There is \"{}\": add \"{}\" by LoadOptions().rename(), or load into {{{{\"{}\", ...}}}}.",
          other,
          other.substr(0, other.size() - name.size()),
          other.substr(0, other.find('.')));
    }
  }
  const std::string near = state::did_you_mean(name, unexpected);
  return near.empty() ? state::did_you_mean(name, stored) : near;
}

class TargetMatch {
 public:
  TargetMatch(
      const Source& source,
      StateDict& target,
      const LoadOptions& options,
      LeftOutParts left_out)
      : source_(source) {
    const std::vector<StateLeaf> slots = state_leaves(target);
    match(slots, options);
    find_parts(slots);
    if (!options.filter()) { // with one, only a part is wanted
      find_unexpected(left_out);
    }
    complain(options);
  }

  MatchedTarget take() {
    return std::move(matched_);
  }

 private:
  void match(const std::vector<StateLeaf>& slots, const LoadOptions& options);
  void match_slot(const StateLeaf& slot, const std::string& name, bool cast);
  void match_tensor(
      const StateLeaf& slot,
      const StoredTensor& stored,
      bool cast);
  void find_parts(const std::vector<StateLeaf>& slots);
  void find_unexpected(LeftOutParts left_out);
  bool is_empty_dictionary(const StoredValue& stored) const;
  void complain(const LoadOptions& options) const;
  void add_reads(
      const StoredTensor& stored,
      const ShardedTensor::Box& box,
      const at::Tensor& to);

  const Source& source_;
  std::vector<std::string> names_; // of the slots, in the checkpoint
  std::set<format::DcpPath::Key> parts_; // that the target has some of
  std::map<std::string, std::vector<std::string>> left_out_; // by part
  std::vector<std::string> problems_;
  MatchedTarget matched_;
};

void TargetMatch::match(
    const std::vector<StateLeaf>& slots,
    const LoadOptions& options) {
  for (const StateLeaf& slot : slots) {
    names_.push_back(
        options.rename() ? options.rename()(slot.name) : slot.name);
    if (!options.filter() || options.filter()(slot.name)) {
      match_slot(slot, names_.back(), options.cast());
    }
  }
}

void TargetMatch::match_slot(
    const StateLeaf& slot,
    const std::string& name,
    bool cast) {
  const StoredTensor* tensor = source_.find_tensor(name);
  const StoredValue* value = source_.find_value(name);
  if (tensor == nullptr && value == nullptr) {
    // Python's checkpoints leave out empty dictionaries.
    if (!(slot.value->is_dict() && slot.value->dict().empty())) {
      matched_.report.missing.push_back(name);
    }
    return;
  }
  if (const auto part = state::find_part_of(*slot.value, name)) {
    problems_.push_back(fmt::format(
        "\"{}\": the target is {}; load into what tessera::get_state_dict(model, optimizers) or a TrainingState gives",
        name,
        state::to_string(*part)));
    return;
  }
  if (slot.is_tensor() != (tensor != nullptr)) {
    problems_.push_back(fmt::format(
        "\"{}\": the checkpoint has a {}, the target {}",
        name,
        tensor != nullptr ? "tensor" : "plain value",
        state::describe(*slot.value)));
    return;
  }
  if (tensor != nullptr) {
    match_tensor(slot, *tensor, cast);
    return;
  }
  try {
    StateValue loaded = from_format(source_.value(*value), name);
    if (slot.value->is_double() && loaded.is_int()) {
      loaded = loaded.to_double(); // Python's 0 for 0.0
    }
    matched_.replacements.push_back({slot.value, std::move(loaded)});
  } catch (const c10::Error& error) {
    problems_.emplace_back(error.what_without_backtrace());
  }
}

void TargetMatch::match_tensor(
    const StateLeaf& slot,
    const StoredTensor& stored,
    bool cast) {
  const bool sharded = slot.value->is_sharded();
  if (!sharded && !slot.value->tensor().defined()) {
    problems_.push_back(
        fmt::format("\"{}\": the target's tensor is not defined", stored.name));
    return;
  }
  const std::vector<int64_t> sizes = sharded
      ? slot.value->sharded().sizes()
      : slot.value->tensor().sizes().vec();
  const at::ScalarType dtype = sharded ? slot.value->sharded().dtype()
                                       : slot.value->tensor().scalar_type();
  if (sizes != stored.sizes || (dtype != from_format(stored.dtype) && !cast)) {
    problems_.push_back(fmt::format(
        "\"{}\": the checkpoint has {}, the target {} [{}]{}",
        stored.name,
        describe(stored),
        dtype_name(dtype),
        fmt::join(sizes, ", "),
        sizes == stored.sizes ? "; LoadOptions().cast(true) converts" : ""));
    return;
  }
  try {
    if (sharded) {
      slot.value->sharded().before_raw_write("load");
    } else {
      comm::before_raw_write(slot.value->tensor(), "load");
    }
  } catch (const c10::Error& error) {
    problems_.push_back(
        fmt::format("\"{}\": {}", stored.name, error.what_without_backtrace()));
    return;
  }
  if (!sharded) {
    const at::Tensor to = slot.value->tensor().detach();
    add_reads(stored, {std::vector<int64_t>(sizes.size(), 0), sizes}, to);
    return;
  }
  for (const ShardedTensor::Piece& piece : slot.value->sharded().pieces()) {
    add_reads(stored, piece.box, piece.tensor.detach());
  }
}

void TargetMatch::add_reads(
    const StoredTensor& stored,
    const ShardedTensor::Box& box,
    const at::Tensor& to) {
  for (const StoredBox& from : stored.boxes) {
    const auto shared = intersect(box, from);
    if (!shared) {
      continue;
    }
    at::Tensor part = to;
    for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
      part = part.narrow(
          static_cast<int64_t>(dim),
          shared->offsets[dim] - box.offsets[dim],
          shared->sizes[dim]);
    }
    matched_.reads.push_back(
        {&stored, &from, source_.locate(stored, from), shared->offsets, part});
    matched_.report.bytes_read += static_cast<uint64_t>(shared->numel()) *
        static_cast<uint64_t>(format::element_bytes(stored.dtype));
  }
}

void TargetMatch::find_parts(const std::vector<StateLeaf>& slots) {
  const std::unordered_set<std::string> known(names_.begin(), names_.end());
  for (const StateLeaf& slot : slots) {
    parts_.insert(slot.keys.front());
  }
  const auto look = [&](const auto& stored) {
    if (known.count(stored.name) > 0 && stored.keys.size() > 1) {
      parts_.insert(stored.keys.front());
    }
  };
  std::for_each(source_.tensors().begin(), source_.tensors().end(), look);
  std::for_each(source_.values().begin(), source_.values().end(), look);
}

void TargetMatch::find_unexpected(LeftOutParts left_out) {
  // If a dictionary leaves out a part of the checkpoint as a whole, that is not
  // a mistake; if it leaves out something inside a part that it has, that may
  // be one.
  const std::unordered_set<std::string> known(names_.begin(), names_.end());
  const auto is_inside_a_part = [&](const auto& stored) {
    return stored.keys.size() == 1 || parts_.count(stored.keys.front()) > 0;
  };
  const auto is_noticed = [&](const auto& stored) {
    return known.count(stored.name) == 0 &&
        (is_inside_a_part(stored) || left_out == LeftOutParts::Refused);
  };
  const auto note = [&](const auto& stored) {
    if (is_inside_a_part(stored)) {
      matched_.report.unexpected.push_back(stored.name);
    } else {
      left_out_[stored.name.substr(0, stored.name.find('.'))].push_back(
          stored.name);
    }
  };
  for (const StoredTensor& tensor : source_.tensors()) {
    if (is_noticed(tensor)) {
      note(tensor);
    }
  }
  for (const StoredValue& value : source_.values()) {
    // An empty dictionary has nothing to lose. Only values that would be
    // noticed are opened: others may be of any kind.
    if (is_noticed(value) && !is_empty_dictionary(value)) {
      note(value);
    }
  }
}

bool TargetMatch::is_empty_dictionary(const StoredValue& stored) const {
  try {
    const StateValue value = from_format(source_.value(stored), stored.name);
    return value.is_dict() && value.dict().empty();
  } catch (const c10::Error&) {
    return false; // a value of a kind that is not supported
  } catch (const FileError&) {
    return false; // the same, or damaged: it is not asked for
  }
}

void TargetMatch::complain(const LoadOptions& options) const {
  std::vector<std::string> lines = problems_;
  if (options.strict()) {
    std::vector<std::string> stored;
    for (const StoredTensor& tensor : source_.tensors()) {
      stored.push_back(tensor.name);
    }
    const auto is_optional = [&](const std::string& name) {
      return options.optional() && options.optional()(name);
    };
    for (const std::string& name : matched_.report.missing) {
      if (is_optional(name)) {
        continue;
      }
      lines.push_back(fmt::format(
          "\"{}\" is not in the checkpoint.{}",
          name,
          hint(name, matched_.report.unexpected, stored)));
    }
    for (const std::string& name : matched_.report.unexpected) {
      if (is_optional(name)) {
        continue;
      }
      lines.push_back(fmt::format(
          "\"{}\" is in the checkpoint only.{}",
          name,
          state::did_you_mean(name, matched_.report.missing)));
    }
    for (const auto& [part, names] : left_out_) {
      if (!std::all_of(names.begin(), names.end(), is_optional)) {
        lines.push_back(fmt::format(
            "the part \"{}\" is in the checkpoint only ({} {}): it would begin anew. Add it (TrainingState::add), or let LoadOptions().optional pass \"{}\".",
            part,
            names.size(),
            names.size() == 1 ? "value" : "values",
            names.front()));
      }
    }
  }
  if (!lines.empty()) {
    raise<c10::ValueError>(
        {.call = "load", .path = source_.path().native()},
        fmt::format(
            "the checkpoint does not fit, and nothing was loaded.{}\n"
            "Correct the names (LoadOptions().rename), leave some out (filter), or load what fits with strict(false).",
            first_lines(lines, 20)));
  }
}

} // namespace

MatchedTarget match_target(
    const Source& source,
    StateDict& target,
    const LoadOptions& options,
    LeftOutParts left_out) {
  MatchedTarget matched = TargetMatch(source, target, options, left_out).take();
  std::sort(
      matched.reads.begin(),
      matched.reads.end(),
      [](const PlannedRead& a, const PlannedRead& b) {
        return std::pair(a.place.file, a.place.offset) <
            std::pair(b.place.file, b.place.offset);
      });
  return matched;
}

} // namespace tessera::checkpoint
