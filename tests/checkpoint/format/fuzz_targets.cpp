#include "checkpoint/format/fuzz_targets.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <variant>

#include "checkpoint/disk/checksums.h"
#include "checkpoint/format/dcp_metadata.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/format/format_error.h"
#include "checkpoint/format/pickle_reader.h"
#include "checkpoint/format/pickle_writer.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/format/safetensors_index.h"
#include "checkpoint/format/torch_file.h"
#include "exported/format/archive_reader.h"
#include "exported/format/program_reader.h"

namespace tessera::format {
namespace {

void require(bool condition, const char* what) {
  if (!condition) {
    std::fprintf(stderr, "%s\n", what);
    std::abort();
  }
}

// Only input may be refused: what we wrote ourselves must be accepted.
template <class Read>
void ignore_refusal(const Read& read) {
  try {
    read();
  } catch (const FormatError&) {
  }
}

__extension__ using Wide = unsigned __int128;

// Behind the last byte of its storage that the tensor reaches.
Wide end_of(const exported::TensorMeta& meta) {
  const auto number = [](const exported::Expression<int64_t>& value) {
    return static_cast<uint64_t>(std::get<int64_t>(value.value));
  };
  Wide last = number(meta.storage_offset);
  for (size_t dim = 0; dim < meta.sizes.size(); ++dim) {
    const uint64_t size = number(meta.sizes[dim]);
    if (size == 0) {
      return 0;
    }
    last += Wide{size - 1} * number(meta.strides[dim]);
  }
  return (last + 1) * static_cast<uint64_t>(element_bytes(meta.dtype));
}

void require_within(
    const std::map<std::string, exported::Payload>& payloads,
    ByteSpan bytes) {
  for (const auto& [path, payload] : payloads) {
    require(
        fits(payload.offset, payload.size, bytes.size()),
        "the bytes of a tensor lie outside the archive");
    require(
        payload.is_missing || end_of(payload.meta) <= payload.size,
        "a tensor reaches beyond its bytes");
  }
}

} // namespace

void fuzz_pickle(ByteSpan bytes) {
  std::string written;
  ignore_refusal([&] { written = write_pickle(read_pickle(bytes)); });
  if (!written.empty()) {
    // As text: NaN differs from itself.
    require(
        write_pickle(read_pickle(as_bytes(written))) == written,
        "a pickle changed when it was written");
  }
}

void fuzz_metadata(ByteSpan bytes) {
  std::optional<DcpMetadata> metadata;
  ignore_refusal([&] { metadata = read_dcp_metadata(bytes); });
  if (metadata) {
    const auto written = write_dcp_metadata(*metadata);
    require(
        read_dcp_metadata(as_bytes(written)) == *metadata,
        "metadata changed when it was written");
  }
}

void fuzz_safetensors(ByteSpan bytes) {
  std::optional<SafetensorsHeader> header;
  ignore_refusal([&] { header = read_safetensors(bytes); });
  if (header) {
    auto written = lay_out_safetensors(&*header);
    written.append(header->tensors.empty() ? 0 : header->tensors.back().end, 0);
    require(
        read_safetensors(as_bytes(written)).tensors == header->tensors,
        "a header changed when it was written");
  }
  ignore_refusal([&] { read_safetensors_index(as_text(bytes)); });
}

void fuzz_torch_file(ByteSpan bytes) {
  ignore_refusal([&] { read_torch_file(bytes); });
}

void fuzz_checksums(ByteSpan bytes) {
  std::string written;
  ignore_refusal([&] {
    written =
        checkpoint::write_checksums(checkpoint::read_checksums(as_text(bytes)));
  });
  require(
      written.empty() || written == as_text(bytes),
      "checksums changed when they were written");
}

// The bytes are the JSON of a program if they begin as such, or an archive with
// programs in it: most of the time of an archive goes into its directory.
void fuzz_exported(ByteSpan bytes) {
  const auto text = as_text(bytes);
  if (text.starts_with('{')) {
    ignore_refusal([&] { exported::read_program(text, "model.json"); });
    return;
  }
  ignore_refusal([&] {
    const auto archive = exported::read_archive(bytes);
    require_within(archive.weights, bytes);
    for (const auto& [name, constants] : archive.constants) {
      require_within(constants, bytes);
    }
  });
}

} // namespace tessera::format
