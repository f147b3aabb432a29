#pragma once

#include <map>
#include <string>
#include <string_view>

#include "checkpoint/format/zip_reader.h"
#include "exported/format/program.h"

namespace tessera::exported {

/// Tensors by path, and the file of the archive that each lies in.
struct PayloadConfig {
  struct Entry {
    std::string file; // "weight_0", beside the config
    TensorMeta meta;
    bool is_parameter = false;
  };
  std::map<std::string, Entry> entries;
};

/// Reads data/weights/NAME_weights_config.json or its like for constants.
/// Throws FormatError, and UnsupportedFormat for payloads that are pickled or
/// not strided, with the tensor's name. `entry` names the config.
PayloadConfig read_payload_config(
    std::string_view json,
    std::string_view entry);

/// What lies in an entry of the archive. Throws FormatError unless the tensor
/// lies within it; `what` names the tensor.
Payload place_payload(
    const PayloadConfig::Entry& entry,
    const format::ZipEntry& stored,
    const std::string& what);

} // namespace tessera::exported
