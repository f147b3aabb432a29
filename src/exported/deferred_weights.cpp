#include "exported/deferred_weights.h"

#include <tessera/error.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <mutex>
#include <string>
#include <utility>

#include "exported/operator_name.h"
#include "exported/payload_file.h"

namespace tessera::exported {
namespace {

at::Tensor read_exported(
    const std::string& path,
    int64_t offset,
    int64_t bytes,
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
  try {
    const at::Tensor storage = PayloadFile(path).read(
        static_cast<uint64_t>(offset), static_cast<uint64_t>(bytes));
    return view_of(storage.to(place), dtype, size, stride, storage_offset);
  } catch (const checkpoint::FileError& error) {
    raise({.call = "load_exported"}, error.what());
  }
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
        "read_exported(str path, int offset, int bytes, int[] size, int[] stride, int storage_offset, *, ScalarType dtype, Device? device=None) -> Tensor");
    library->impl(
        "read_exported",
        torch::dispatch(
            c10::DispatchKey::CompositeExplicitAutograd,
            TORCH_FN(read_exported)));
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
      static_cast<int64_t>(payload.size),
      written_numbers(payload.meta.sizes),
      written_numbers(payload.meta.strides),
      std::get<int64_t>(payload.meta.storage_offset.value),
      to_scalar_type(payload.meta.dtype),
      device);
}

} // namespace tessera::exported
