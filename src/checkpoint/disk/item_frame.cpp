#include "checkpoint/disk/item_frame.h"

#include <caffe2/serialize/inline_container.h>

#include "checkpoint/disk/file_error.h"
#include "checkpoint/disk/torch_parts.h"
#include "checkpoint/format/extent.h"
#include "checkpoint/format/pickle_writer.h"

namespace tessera::checkpoint {

namespace {

using caffe2::serialize::PyTorchStreamWriter;

void write_record(
    PyTorchStreamWriter& writer,
    const std::string& name,
    const std::string& text) {
  writer.writeRecord(name, text.data(), text.size());
}

} // namespace

TensorFrame frame_tensor(
    format::DType dtype,
    const std::vector<int64_t>& sizes) {
  const auto bytes = format::checked_bytes(sizes, format::element_bytes(dtype));
  if (!bytes) {
    throw FileError("a tensor whose size does not fit into 63 bits");
  }
  TensorFrame frame;
  frame.data_bytes = static_cast<uint64_t>(*bytes);
  const Hole hole(frame.data_bytes);
  bool past_hole = false;
  PyTorchStreamWriter writer(
      [&](const void* data, size_t size) {
        if (data == hole.begin()) {
          past_hole = true;
        } else {
          (past_hole ? frame.tail : frame.head)
              .append(static_cast<const char*>(data), size);
        }
        return size;
      },
      /*compute_crc32=*/false);
  write_record(
      writer,
      "data.pkl",
      format::write_pickle(row_major_tensor(dtype, sizes, "0")));
  write_record(writer, "byteorder", "little");
  writer.writeRecord("data/0", hole.begin(), frame.data_bytes);
  writer.writeEndOfFile();
  return frame;
}

std::string value_item(const format::Value& value) {
  std::string item;
  PyTorchStreamWriter writer(
      [&](const void* data, size_t size) {
        item.append(static_cast<const char*>(data), size);
        return size;
      },
      /*compute_crc32=*/false);
  write_record(writer, "data.pkl", format::write_pickle(value));
  write_record(writer, "byteorder", "little");
  writer.writeEndOfFile();
  return item;
}

} // namespace tessera::checkpoint
