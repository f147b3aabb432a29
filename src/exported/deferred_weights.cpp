#include "exported/deferred_weights.h"

#include <tessera/error.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "base/fnv.h"
#include "deferred/tape.h"
#include "exported/operator_name.h"
#include "exported/payload_file.h"

namespace tessera::exported {
namespace {

/// A part of a payload, in elements.
at::Tensor read_part(
    const std::string& path,
    int64_t offset,
    at::ScalarType dtype,
    int64_t begin,
    int64_t numel) {
  const auto element_size = static_cast<int64_t>(c10::elementSize(dtype));
  try {
    return PayloadFile(path)
        .read(
            static_cast<uint64_t>(offset + begin * element_size),
            static_cast<uint64_t>(numel * element_size))
        .view(dtype);
  } catch (const checkpoint::FileError& error) {
    raise({.call = "load_exported"}, error.what());
  }
}

/// Reads only what lies between the first and the last element of the tensor in
/// the payload.
at::Tensor read_exported(
    const std::string& path,
    int64_t offset,
    int64_t /*checksum*/,
    at::IntArrayRef size,
    at::IntArrayRef stride,
    int64_t storage_offset,
    at::ScalarType dtype,
    std::optional<at::Device> device) {
  const at::Device place = device.value_or(at::kCPU);
  if (place.is_meta()) {
    return at::empty_strided(
        size, stride, at::TensorOptions(dtype).device(place));
  }
  return read_part(
             path,
             offset,
             dtype,
             storage_offset,
             deferred::extent_of(size, stride))
      .to(place)
      .as_strided(size, stride);
}

/// Whether the elements follow one another in memory, in the order of the
/// flattened tensor.
bool is_in_order(at::IntArrayRef size, at::IntArrayRef stride) {
  int64_t step = 1;
  for (size_t dim = size.size(); dim-- > 0;) {
    if (size[dim] > 1 && stride[dim] != step) {
      return false;
    }
    step *= size[dim];
  }
  return true;
}

/// The digest of a weight whose payload has this checksum. Where the payload
/// lies, and in which file, says nothing about its values.
std::optional<int64_t> digest_of_weight(
    int64_t checksum,
    at::IntArrayRef size,
    at::IntArrayRef stride,
    int64_t storage_offset,
    at::ScalarType dtype) {
  if (checksum == 0) { // whoever wrote the archive computed none
    return std::nullopt;
  }
  uint64_t digest = mix_digest(kFnvStart, static_cast<uint64_t>(checksum));
  for (const at::IntArrayRef numbers : {size, stride}) {
    for (const int64_t number : numbers) {
      digest = mix_digest(digest, static_cast<uint64_t>(number));
    }
  }
  digest = mix_digest(digest, static_cast<uint64_t>(storage_offset));
  return static_cast<int64_t>(mix_digest(digest, static_cast<uint64_t>(dtype)));
}

/// See [Note: elements overloads].
std::tuple<at::Tensor, std::optional<int64_t>> read_exported_elements(
    const std::string& path,
    int64_t offset,
    int64_t checksum,
    at::IntArrayRef size,
    at::IntArrayRef stride,
    int64_t storage_offset,
    at::ScalarType dtype,
    std::optional<at::Device> device,
    int64_t begin,
    int64_t numel) {
  const auto digest =
      digest_of_weight(checksum, size, stride, storage_offset, dtype);
  if (!is_in_order(size, stride)) {
    const at::Tensor whole = read_exported(
        path, offset, checksum, size, stride, storage_offset, dtype, device);
    return {whole.reshape({-1}).narrow(0, begin, numel), digest};
  }
  return {
      read_part(path, offset, dtype, storage_offset + begin, numel)
          .to(device.value_or(at::kCPU)),
      digest};
}

constexpr const char* kReadName = "tessera::read_exported";
using ReadOperator = at::Tensor(
    const std::string&,
    int64_t,
    int64_t,
    at::IntArrayRef,
    at::IntArrayRef,
    int64_t,
    at::ScalarType,
    std::optional<at::Device>);

c10::TypedOperatorHandle<ReadOperator> read_operator() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Never destroyed: operators may run in static destructors.
    static auto* library = new torch::Library(
        torch::Library::FRAGMENT, "tessera", std::nullopt, __FILE__, __LINE__);
    library->def(
        "read_exported(str path, int offset, int checksum, int[] size, int[] stride, int storage_offset, *, ScalarType dtype, Device? device=None) -> Tensor");
    library->def(
        "read_exported.elements(str path, int offset, int checksum, int[] size, int[] stride, int storage_offset, *, ScalarType dtype, Device? device=None, int begin, int numel) -> (Tensor, int?)");
    library->impl(
        "read_exported",
        torch::dispatch(
            c10::DispatchKey::CompositeExplicitAutograd,
            TORCH_FN(read_exported)));
    library->impl(
        "read_exported.elements",
        torch::dispatch(
            c10::DispatchKey::CompositeExplicitAutograd,
            TORCH_FN(read_exported_elements)));
  });
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(kReadName, "")
      .typed<ReadOperator>();
}

} // namespace

at::Tensor read_by_operator(
    const std::filesystem::path& path,
    const Payload& payload,
    at::Device device) {
  return read_operator().call(
      path.native(),
      static_cast<int64_t>(payload.offset),
      static_cast<int64_t>(payload.checksum),
      written_numbers(payload.meta.sizes),
      written_numbers(payload.meta.strides),
      std::get<int64_t>(payload.meta.storage_offset.value),
      to_scalar_type(payload.meta.dtype),
      device);
}

} // namespace tessera::exported
