#include "exported/payload_file.h"

#include <ATen/ops/empty.h>

namespace tessera::exported {

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

} // namespace tessera::exported
