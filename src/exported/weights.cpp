#include "exported/weights.h"

#include <tessera/deferred/deferred_init.h>
#include <tessera/error.h>

#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>

#include "deferred/deferred_tensor.h"
#include "exported/deferred_weights.h"
#include "exported/operator_name.h"
#include "exported/payload_file.h"

namespace tessera::exported {
namespace {

using Numbers = std::vector<int64_t>;

/// A tensor whose values come later: NaN shows that they did not.
at::Tensor unfilled(const TensorMeta& meta, std::optional<at::Device> device) {
  const at::Tensor result = at::empty_strided(
      written_numbers(meta.sizes),
      written_numbers(meta.strides),
      at::TensorOptions(to_scalar_type(meta.dtype))
          .device(device.value_or(at::kCPU)));
  if (result.is_floating_point()) {
    result.fill_(std::numeric_limits<double>::quiet_NaN());
  } else {
    result.zero_();
  }
  return result;
}

/// Where the elements of a tensor are in its payload.
class Elements {
 public:
  explicit Elements(const Payload& payload)
      : dtype_(to_scalar_type(payload.meta.dtype)),
        sizes_(written_numbers(payload.meta.sizes)),
        strides_(written_numbers(payload.meta.strides)),
        first_(std::get<int64_t>(payload.meta.storage_offset.value)),
        end_(first_ + 1) {
    for (size_t dim = 0; dim < sizes_.size(); ++dim) {
      if (strides_[dim] == 0) { // all of them are one
        sizes_[dim] = std::min(sizes_[dim], int64_t{1});
      }
      count_ *= sizes_[dim];
      end_ += (sizes_[dim] - 1) * strides_[dim];
    }
  }

  /// Whether two tensors have bytes in common.
  bool overlap(const Elements& other) const {
    if (count_ == 0 || other.count_ == 0) {
      return false;
    }
    if (dtype_ != other.dtype_) {
      return bytes(first_) < other.bytes(other.end_) &&
          other.bytes(other.first_) < bytes(end_);
    }
    if (end_ <= other.first_ || other.end_ <= first_) {
      return false;
    }
    if (count_ > end_ - first_ || other.count_ > other.end_ - other.first_) {
      return true; // each has elements twice
    }
    // One may hold what lies between the elements of the other.
    std::vector<bool> mine(static_cast<size_t>(std::max(end_, other.end_)));
    each(0, first_, [&](size_t element) { mine[element] = true; });
    bool found = false;
    other.each(0, other.first_, [&](size_t element) {
      found = found || mine[element];
    });
    return found;
  }

 private:
  int64_t bytes(int64_t element) const {
    return element * static_cast<int64_t>(c10::elementSize(dtype_));
  }
  template <class Use>
  void each(size_t dim, int64_t at, const Use& use) const {
    if (dim == sizes_.size()) {
      use(static_cast<size_t>(at));
      return;
    }
    for (int64_t i = 0; i < sizes_[dim]; ++i) {
      each(dim + 1, at + i * strides_[dim], use);
    }
  }

  at::ScalarType dtype_;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
  int64_t first_ = 0;
  int64_t end_ = 0;
  int64_t count_ = 1;
};

std::string_view kind_text(const WeightSpec& spec) {
  switch (spec.kind) {
    case WeightSpec::Kind::Parameter:
      return "parameter";
    case WeightSpec::Kind::Buffer:
      return "buffer";
    case WeightSpec::Kind::Constant:
      return "constant";
  }
  return "";
}

/// What tells a tensor from the others.
using WeightKey = std::
    tuple<uint64_t, DType, Numbers, Numbers, int64_t, WeightSpec::Kind, bool>;

WeightKey key_of(const WeightSpec& spec) {
  const Payload& payload = *spec.payload;
  return {
      payload.offset,
      payload.meta.dtype,
      written_numbers(payload.meta.sizes),
      written_numbers(payload.meta.strides),
      std::get<int64_t>(payload.meta.storage_offset.value),
      spec.kind,
      is_trained(spec)};
}

/// Whether they differ at most in what they are for.
bool is_same_view(WeightKey one, const WeightKey& other) {
  std::get<WeightSpec::Kind>(one) = std::get<WeightSpec::Kind>(other);
  std::get<bool>(one) = std::get<bool>(other);
  return one == other;
}

/// Reads payloads, each once.
class WeightReader {
 public:
  WeightReader(
      const std::filesystem::path& path,
      bool names_missing,
      std::optional<at::Device> device)
      : file_(path), names_missing_(names_missing), device_(device) {}

  at::Tensor read(const WeightSpec& spec) {
    const Payload& payload = *spec.payload;
    const WeightKey key = key_of(spec);
    const auto found = tensors_.find(key);
    if (found != tensors_.end()) {
      return found->second;
    }
    const at::Tensor tensor = view(storage(payload), payload.meta);
    if (payload.size > 0) {
      tensors_.emplace(key, tensor);
    }
    return tensor;
  }

  /// The same under a DeferredInit. See [Note: deferred weights].
  at::Tensor defer(const std::filesystem::path& path, const WeightSpec& spec) {
    at::Tensor& tensor = tensors_[key_of(spec)];
    if (!tensor.defined() || spec.payload->size == 0) {
      tensor =
          read_by_operator(path, *spec.payload, device_.value_or(at::kCPU));
    }
    return tensor;
  }

  /// A tensor whose bytes the archive lacks.
  at::Tensor unfilled(const WeightSpec& spec) {
    if (!names_missing_) {
      return exported::unfilled(spec.payload->meta, device_);
    }
    at::Tensor& tensor = tensors_[key_of(spec)];
    if (!tensor.defined()) {
      tensor = exported::unfilled(spec.payload->meta, device_);
    }
    return tensor;
  }

 private:
  /// All bytes of a payload, on the device.
  at::Tensor storage(const Payload& payload) {
    const auto found = storages_.find(payload.offset);
    if (found != storages_.end() && payload.size > 0) {
      return found->second;
    }
    at::Tensor bytes = file_.read(payload.offset, payload.size);
    if (device_) {
      bytes = bytes.to(*device_);
    }
    storages_.emplace(payload.offset, bytes);
    return bytes;
  }

  static at::Tensor view(const at::Tensor& bytes, const TensorMeta& meta) {
    return view_of(
        bytes,
        to_scalar_type(meta.dtype),
        written_numbers(meta.sizes),
        written_numbers(meta.strides),
        std::get<int64_t>(meta.storage_offset.value));
  }

  PayloadFile file_;
  bool names_missing_;
  std::optional<at::Device> device_;
  std::map<uint64_t, at::Tensor> storages_;
  std::map<WeightKey, at::Tensor> tensors_;
};

/// Constants of a program have memory, also under a DeferredInit.
at::Tensor read_now(WeightReader& reader, const WeightSpec& spec) {
  const c10::impl::ExcludeDispatchKeyGuard not_recorded(deferred::kDeferredKey);
  return reader.read(spec);
}

void refuse_separation(
    const std::filesystem::path& path,
    const std::vector<WeightSpec>& specs,
    bool names_missing) {
  for (const SharedMemory& shared : shared_memory(specs, names_missing)) {
    if (is_trained(specs[shared.one]) || is_trained(specs[shared.other])) {
      raise<c10::NotImplementedError>(
          {.call = "load_exported", .path = path.native()},
          fmt::format(
              "{} share their memory, and deferred tensors have memory of their own, so a step would change only one of them. Load the model without deferring, or compute the one from the other in forward().",
              describe(shared, specs)));
    }
  }
}

} // namespace

bool is_trained(const WeightSpec& spec) {
  return spec.kind == WeightSpec::Kind::Parameter &&
      spec.payload->meta.requires_grad;
}

std::vector<SharedMemory> shared_memory(
    const std::vector<WeightSpec>& specs,
    bool names_missing) {
  std::map<uint64_t, std::vector<size_t>> by_payload;
  for (size_t i = 0; i < specs.size(); ++i) {
    const Payload& payload = *specs[i].payload;
    if (payload.is_missing ? names_missing : payload.size > 0) {
      by_payload[payload.offset].push_back(i);
    }
  }
  std::vector<SharedMemory> result;
  for (const auto& entry : by_payload) {
    const std::vector<size_t>& weights = entry.second;
    for (size_t i = 0; i < weights.size(); ++i) {
      for (size_t k = i + 1; k < weights.size(); ++k) {
        const WeightSpec& one = specs[weights[i]];
        const WeightSpec& other = specs[weights[k]];
        const bool overlap = one.payload->is_missing
            ? is_same_view(key_of(one), key_of(other))
            : Elements(*one.payload).overlap(Elements(*other.payload));
        if (overlap && key_of(one) != key_of(other)) {
          result.push_back({weights[i], weights[k]});
        }
      }
    }
  }
  return result;
}

std::string describe(
    const SharedMemory& shared,
    const std::vector<WeightSpec>& specs) {
  const WeightSpec& one = specs[shared.one];
  const WeightSpec& other = specs[shared.other];
  return fmt::format(
      "the {} \"{}\" and the {} \"{}\"",
      kind_text(one),
      one.path,
      kind_text(other),
      other.path);
}

std::vector<at::Tensor> read_weights(
    const std::filesystem::path& path,
    const std::vector<WeightSpec>& specs,
    bool names_missing,
    const ExportedOptions& options) {
  WeightReader reader(path, names_missing, options.device());
  const bool defers = options.deferred() ||
      c10::impl::tls_is_dispatch_key_included(deferred::kDeferredKey);
  std::optional<DeferredInit> deferred;
  if (defers) {
    refuse_separation(path, specs, names_missing);
    deferred.emplace();
  }
  std::vector<at::Tensor> result;
  for (const WeightSpec& spec : specs) {
    if (!spec.payload->is_missing) {
      const bool is_registered = spec.kind != WeightSpec::Kind::Constant;
      result.push_back(
          defers && is_registered ? reader.defer(path, spec)
                                  : read_now(reader, spec));
    } else if (options.allow_missing()) {
      result.push_back(reader.unfilled(spec));
    } else {
      raise<c10::ValueError>(
          {.call = "load_exported",
           .parameter = spec.path,
           .path = path.native()},
          "the file has no values for it, since the model was exported with fake tensors. Load it with ExportedOptions().allow_missing(true), then load a checkpoint into it.");
    }
  }
  return result;
}

} // namespace tessera::exported
