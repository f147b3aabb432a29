#include "exported/weights.h"

#include <tessera/error.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "checkpoint/disk/input.h"
#include "exported/operator_name.h"

namespace tessera::exported {
namespace {

using Numbers = std::vector<int64_t>;

Numbers written_numbers(
    const std::vector<std::variant<std::string, int64_t>>& values) {
  Numbers result;
  for (const auto& value : values) {
    result.push_back(std::get<int64_t>(value));
  }
  return result;
}

Numbers written_numbers(const std::vector<Expression<int64_t>>& numbers) {
  std::vector<std::variant<std::string, int64_t>> values;
  for (const auto& number : numbers) {
    values.push_back(number.value);
  }
  return written_numbers(values);
}

/// Reads payloads, each once.
class WeightReader {
 public:
  WeightReader(
      const std::filesystem::path& path,
      std::optional<at::Device> device)
      : path_(checkpoint::resolve(path)),
        input_(checkpoint::open_input(path_)),
        device_(device) {}

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
    at::Tensor bytes = at::empty(
        {static_cast<int64_t>(payload.size)}, at::TensorOptions(at::kByte));
    checkpoint::read_at(
        input_.file,
        path_,
        payload.offset,
        bytes.mutable_data_ptr<uint8_t>(),
        payload.size);
    if (device_) {
      bytes = bytes.to(*device_);
    }
    storages_.emplace(payload.offset, bytes);
    return bytes;
  }

  static at::Tensor view(const at::Tensor& bytes, const TensorMeta& meta) {
    return at::empty(
               {0},
               at::TensorOptions(to_scalar_type(meta.dtype))
                   .device(bytes.device()))
        .set_(
            bytes.storage(),
            std::get<int64_t>(meta.storage_offset.value),
            written_numbers(meta.sizes),
            written_numbers(meta.strides));
  }

  std::filesystem::path path_;
  checkpoint::Input input_;
  std::optional<at::Device> device_;
  std::map<uint64_t, at::Tensor> storages_;
  std::map<Key, at::Tensor> tensors_;
};

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

} // namespace

std::vector<at::Tensor> read_weights(
    const std::filesystem::path& path,
    const std::vector<WeightSpec>& specs,
    std::optional<at::Device> device,
    bool allow_missing) {
  WeightReader reader(path, device);
  std::vector<at::Tensor> result;
  for (const WeightSpec& spec : specs) {
    if (!spec.payload->is_missing) {
      result.push_back(reader.read(*spec.payload));
    } else if (allow_missing) {
      result.push_back(unfilled(spec.payload->meta, device));
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
