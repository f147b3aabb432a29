#include "checkpoint/load_job.h"

#include <tessera/error.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <optional>
#include <set>
#include <thread>
#include <unordered_set>
#include <utility>

#include "checkpoint/disk/read_region.h"
#include "checkpoint/values.h"
#include "comm/raw_access.h"
#include "state/describe.h"
#include "state/nearest.h"
#include "state/part_of.h"

namespace tessera::checkpoint {

namespace {

constexpr size_t kMaxLines = 20;
/// How many bytes are converted or copied to a device at a time.
constexpr int64_t kReadAtOnceBytes = int64_t{16} << 20;

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

std::vector<int64_t> byte_strides(const at::Tensor& tensor) {
  std::vector<int64_t> strides = tensor.strides().vec();
  for (int64_t& stride : strides) {
    stride *= static_cast<int64_t>(tensor.element_size());
  }
  return strides;
}

/// Fills `to`, which begins at `begin`, through host memory of the stored
/// dtype, a part at a time, each filled by `straight`.
void convert(
    const at::Tensor& to,
    const std::vector<int64_t>& begin,
    at::ScalarType dtype,
    const std::function<
        void(const at::Tensor& to, const std::vector<int64_t>& begin)>&
        straight) {
  const int64_t bytes =
      to.numel() * static_cast<int64_t>(c10::elementSize(dtype));
  int64_t dim = 0;
  while (dim < to.dim() && to.size(dim) == 1) {
    ++dim;
  }
  if (bytes <= kReadAtOnceBytes || dim == to.dim()) {
    const at::Tensor staged = at::empty(to.sizes(), dtype);
    straight(staged, begin);
    to.copy_(staged);
    return;
  }
  const int64_t rows =
      std::max<int64_t>(1, kReadAtOnceBytes / (bytes / to.size(dim)));
  for (int64_t i = 0; i < to.size(dim); i += rows) {
    std::vector<int64_t> at = begin;
    at[static_cast<size_t>(dim)] += i;
    convert(
        to.narrow(dim, i, std::min(rows, to.size(dim) - i)),
        at,
        dtype,
        straight);
  }
}

/// The first `kMaxLines` lines, and how many more there are.
std::string list_of(const std::vector<std::string>& lines) {
  std::string text;
  for (size_t i = 0; i < std::min(lines.size(), kMaxLines); ++i) {
    text += "\n  " + lines[i];
  }
  if (lines.size() > kMaxLines) {
    text += fmt::format("\n  and {} more", lines.size() - kMaxLines);
  }
  return text;
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

} // namespace

LoadJob::LoadJob(
    const Source& source,
    StateDict& target,
    const LoadOptions& options,
    int num_threads)
    : source_(source),
      num_threads_(num_threads),
      verifies_(options.verify() != Verify::Never),
      progress_(options.progress()) {
  const std::vector<StateLeaf> slots = state_leaves(target);
  match(slots, options);
  find_unexpected(slots, options);
  complain(options);
  std::sort(reads_.begin(), reads_.end(), [](const Read& a, const Read& b) {
    return std::pair(a.place.file, a.place.offset) <
        std::pair(b.place.file, b.place.offset);
  });
  report_.bytes_read = total_bytes_;
}

void LoadJob::match(
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

void LoadJob::match_slot(
    const StateLeaf& slot,
    const std::string& name,
    bool cast) {
  const StoredTensor* tensor = source_.find_tensor(name);
  const StoredValue* value = source_.find_value(name);
  if (tensor == nullptr && value == nullptr) {
    // Python's checkpoints leave out empty dictionaries.
    if (!(slot.value->is_dict() && slot.value->dict().empty())) {
      report_.missing.push_back(name);
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
    replacements_.push_back({slot.value, std::move(loaded)});
  } catch (const c10::Error& error) {
    problems_.emplace_back(error.what_without_backtrace());
  }
}

void LoadJob::match_tensor(
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

void LoadJob::add_reads(
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
    reads_.push_back(
        {&stored, &from, source_.locate(stored, from), shared->offsets, part});
    total_bytes_ += static_cast<uint64_t>(shared->numel()) *
        static_cast<uint64_t>(format::element_bytes(stored.dtype));
  }
}

void LoadJob::find_unexpected(
    const std::vector<StateLeaf>& slots,
    const LoadOptions& options) {
  // If the target leaves out a part of the checkpoint as a whole, that is not a
  // mistake; if it leaves out something inside a part that it has, that may be
  // one.
  const std::unordered_set<std::string> known(names_.begin(), names_.end());
  std::set<format::DcpPath::Key> parts;
  for (const StateLeaf& slot : slots) {
    parts.insert(slot.keys.front());
  }
  const auto look = [&](const auto& stored) {
    if (known.count(stored.name) > 0) {
      if (stored.keys.size() > 1) {
        parts.insert(stored.keys.front());
      }
    }
  };
  std::for_each(source_.tensors().begin(), source_.tensors().end(), look);
  std::for_each(source_.values().begin(), source_.values().end(), look);
  const auto check = [&](const auto& stored) {
    if (known.count(stored.name) == 0 &&
        (stored.keys.size() == 1 || parts.count(stored.keys.front()) > 0)) {
      report_.unexpected.push_back(stored.name);
    }
  };
  std::for_each(source_.tensors().begin(), source_.tensors().end(), check);
  std::for_each(source_.values().begin(), source_.values().end(), check);
  if (options.filter()) {
    report_.unexpected.clear(); // only a part is wanted
  }
}

void LoadJob::complain(const LoadOptions& options) const {
  std::vector<std::string> lines = problems_;
  if (options.strict()) {
    std::vector<std::string> stored;
    for (const StoredTensor& tensor : source_.tensors()) {
      stored.push_back(tensor.name);
    }
    const auto is_optional = [&](const std::string& name) {
      return options.optional() && options.optional()(name);
    };
    for (const std::string& name : report_.missing) {
      if (is_optional(name)) {
        continue;
      }
      lines.push_back(fmt::format(
          "\"{}\" is not in the checkpoint.{}",
          name,
          hint(name, report_.unexpected, stored)));
    }
    for (const std::string& name : report_.unexpected) {
      if (is_optional(name)) {
        continue;
      }
      lines.push_back(fmt::format(
          "\"{}\" is in the checkpoint only.{}",
          name,
          state::did_you_mean(name, report_.missing)));
    }
  }
  if (!lines.empty()) {
    raise<c10::ValueError>(
        {.call = "load", .path = source_.path().native()},
        fmt::format(
            "the checkpoint does not fit, and nothing was loaded.{}\n"
            "Correct the names (LoadOptions().rename), leave some out (filter), or load what fits with strict(false).",
            list_of(lines)));
  }
}

void LoadJob::in_threads(
    const std::function<void(const Read& read, BlockReader& reader)>& body) {
  // Regions that are neighbours in a file stay together.
  const uint64_t share = total_bytes_ / static_cast<uint64_t>(num_threads_) + 1;
  std::vector<std::pair<size_t, size_t>> parts;
  uint64_t bytes = 0;
  size_t begin = 0;
  for (size_t i = 0; i < reads_.size(); ++i) {
    bytes += static_cast<uint64_t>(reads_[i].to.numel()) *
        static_cast<uint64_t>(format::element_bytes(reads_[i].tensor->dtype));
    if (bytes >= share || i + 1 == reads_.size()) {
      parts.emplace_back(begin, i + 1);
      begin = i + 1;
      bytes = 0;
    }
  }
  std::vector<std::exception_ptr> errors(parts.size());
  std::atomic<bool> failed = false;
  const auto run = [&](size_t part) {
    at::NoGradGuard no_grad;
    try {
      BlockReader reader(source_, verifies_);
      for (size_t i = parts[part].first; i < parts[part].second && !failed;
           ++i) {
        body(reads_[i], reader);
      }
    } catch (...) {
      errors[part] = std::current_exception();
      failed = true;
    }
  };
  std::vector<std::jthread> threads;
  for (size_t part = 1; part < parts.size(); ++part) {
    threads.emplace_back(run, part);
  }
  if (!parts.empty()) {
    run(0);
  }
  for (std::jthread& thread : threads) {
    thread.join();
  }
  for (const std::exception_ptr& error : errors) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
}

void LoadJob::verify() {
  in_threads([&](const Read& read, BlockReader& reader) {
    const auto element = format::element_bytes(read.tensor->dtype);
    int64_t first = 0;
    int64_t last = 0;
    for (size_t dim = 0; dim < read.begin.size(); ++dim) {
      const int64_t stride = read.place.strides[dim] * element;
      first += (read.begin[dim] - read.box->offsets[dim]) * stride;
      last += (read.to.size(static_cast<int64_t>(dim)) - 1) * stride;
    }
    std::vector<uint8_t> scratch(kBlockBytes);
    const uint64_t begin = read.place.offset + static_cast<uint64_t>(first);
    const uint64_t end = begin + static_cast<uint64_t>(last + element);
    for (uint64_t at = begin; at < end; at += kBlockBytes) {
      reader.read(
          read.place.file, at, scratch.data(), std::min(kBlockBytes, end - at));
    }
  });
}

void LoadJob::read() {
  // Memory that a save still holds gets its copy here: if several threads wrote
  // to one storage, each of them would try to copy it.
  for (const Read& read : reads_) {
    if (read.to.is_cpu()) {
      read.to.mutable_data_ptr();
    }
  }
  in_threads([&](const Read& read, BlockReader& reader) {
    fill(read, reader);
    if (progress_) {
      const std::lock_guard lock(mutex_);
      done_bytes_ += static_cast<uint64_t>(read.to.numel()) *
          static_cast<uint64_t>(format::element_bytes(read.tensor->dtype));
      progress_(done_bytes_, total_bytes_);
    }
  });
}

void LoadJob::fill(const Read& read, BlockReader& reader) {
  const at::ScalarType dtype = from_format(read.tensor->dtype);
  const auto straight = [&](const at::Tensor& to,
                            const std::vector<int64_t>& begin) {
    read_region(
        reader,
        *read.tensor,
        *read.box,
        read.place,
        begin,
        to.sizes().vec(),
        static_cast<uint8_t*>(to.mutable_data_ptr()),
        byte_strides(to));
  };
  if (read.to.is_cpu() && read.to.scalar_type() == dtype &&
      !read.to.is_conj() && !read.to.is_neg()) {
    straight(read.to, read.begin);
  } else {
    convert(read.to, read.begin, dtype, straight);
  }
  if (!read.to.is_inference()) {
    read.to.unsafeGetTensorImpl()->bump_version();
  }
}

void LoadJob::replace_values() {
  for (Replacement& replacement : replacements_) {
    *replacement.at = std::move(replacement.value);
  }
  replacements_.clear();
}

} // namespace tessera::checkpoint
