#include "exported/payload_file.h"

#include <ATen/ops/empty.h>

#include <atomic>

namespace tessera::exported {
namespace {

std::atomic<uint64_t> bytes_read = 0;

} // namespace

uint64_t testing::payload_bytes_read() {
  return bytes_read;
}

std::vector<int64_t> written_numbers(
    const std::vector<Expression<int64_t>>& numbers) {
  std::vector<int64_t> result;
  for (const auto& number : numbers) {
    result.push_back(std::get<int64_t>(number.value));
  }
  return result;
}

PayloadFile::PayloadFile(const std::filesystem::path& path)
    : path_(checkpoint::resolve(path)), input_(checkpoint::open_input(path_)) {}

at::Tensor PayloadFile::read(uint64_t offset, uint64_t size) const {
  at::Tensor bytes =
      at::empty({static_cast<int64_t>(size)}, at::TensorOptions(at::kByte));
  checkpoint::read_at(
      input_.file, path_, offset, bytes.mutable_data_ptr<uint8_t>(), size);
  bytes_read += size;
  return bytes;
}

at::Tensor view_of(
    const at::Tensor& bytes,
    at::ScalarType dtype,
    at::IntArrayRef sizes,
    at::IntArrayRef strides,
    int64_t storage_offset) {
  return at::empty({0}, at::TensorOptions(dtype).device(bytes.device()))
      .set_(bytes.storage(), storage_offset, sizes, strides);
}

at::Tensor MemoryCopies::copy(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  at::Tensor& bytes = copies_[storage.unsafeGetStorageImpl()];
  if (!bytes.defined()) {
    const at::Tensor whole =
        at::empty({0}, at::TensorOptions(at::kByte).device(tensor.device()));
    bytes = whole.set_(storage, 0, {static_cast<int64_t>(storage.nbytes())})
                .to(device_.value_or(tensor.device()),
                    at::kByte,
                    /*non_blocking=*/false,
                    /*copy=*/true);
  }
  return view_of(
      bytes,
      tensor.scalar_type(),
      tensor.sizes(),
      tensor.strides(),
      tensor.storage_offset());
}

} // namespace tessera::exported
