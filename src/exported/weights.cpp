#include "exported/weights.h"

#include <tessera/deferred/deferred_init.h>
#include <tessera/error.h>

#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <limits>
#include <map>
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

/// Reads payloads, each once.
class WeightReader {
 public:
  WeightReader(
      const std::filesystem::path& path,
      bool names_missing,
      std::optional<at::Device> device)
      : file_(path), names_missing_(names_missing), device_(device) {}

  at::Tensor read(const Payload& payload) {
    const Key key = key_of(payload);
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
  at::Tensor defer(const std::filesystem::path& path, const Payload& payload) {
    at::Tensor& tensor = tensors_[key_of(payload)];
    if (!tensor.defined() || payload.size == 0) {
      tensor = read_by_operator(path, payload, device_.value_or(at::kCPU));
    }
    return tensor;
  }

  /// A tensor whose bytes the archive lacks.
  at::Tensor unfilled(const Payload& payload) {
    if (!names_missing_) {
      return exported::unfilled(payload.meta, device_);
    }
    at::Tensor& tensor = tensors_[key_of(payload)];
    if (!tensor.defined()) {
      tensor = exported::unfilled(payload.meta, device_);
    }
    return tensor;
  }

 private:
  using Key = std::tuple<uint64_t, DType, Numbers, Numbers, int64_t>;

  static Key key_of(const Payload& payload) {
    return {
        payload.offset,
        payload.meta.dtype,
        written_numbers(payload.meta.sizes),
        written_numbers(payload.meta.strides),
        std::get<int64_t>(payload.meta.storage_offset.value)};
  }

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
  std::map<Key, at::Tensor> tensors_;
};

/// Constants of a program have memory, also under a DeferredInit.
at::Tensor read_now(WeightReader& reader, const Payload& payload) {
  const c10::impl::ExcludeDispatchKeyGuard not_recorded(engine::kDeferredKey);
  return reader.read(payload);
}

} // namespace

std::vector<at::Tensor> read_weights(
    const std::filesystem::path& path,
    const std::vector<WeightSpec>& specs,
    bool names_missing,
    const ExportedOptions& options) {
  WeightReader reader(path, names_missing, options.device());
  const bool defers = options.deferred() ||
      c10::impl::tls_is_dispatch_key_included(engine::kDeferredKey);
  std::optional<DeferredInit> deferred;
  if (defers) {
    deferred.emplace();
  }
  std::vector<at::Tensor> result;
  for (const WeightSpec& spec : specs) {
    if (!spec.payload->is_missing) {
      const bool is_registered = spec.kind != WeightSpec::Kind::Constant;
      result.push_back(
          defers && is_registered ? reader.defer(path, *spec.payload)
                                  : read_now(reader, *spec.payload));
    } else if (options.allow_missing()) {
      result.push_back(reader.unfilled(*spec.payload));
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
