// The tensors of an archive.
#pragma once

#include <tessera/exported/exported.h>

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>
#include <vector>

#include "exported/format/program.h"

namespace tessera::exported {

/// A parameter, a buffer or a constant tensor of a model.
struct WeightSpec {
  enum class Kind : uint8_t { Parameter, Buffer, Constant };
  Kind kind = Kind::Parameter;
  std::string path; // in the model; a constant's is not a module's
  bool is_persistent = true; // a buffer
  const Payload* payload = nullptr; // in the archive
};

/// Reads all of these from the archive's file. Tensors of one payload share
/// their memory, and those that are tied are one tensor, also those whose bytes
/// the archive lacks, if it `names_missing` (Archive). Parameters and buffers
/// are deferred, if the options say so. Throws checkpoint::FileError if the
/// file ends early or changed, and c10::ValueError if the archive lacks a
/// tensor's bytes, unless that is allowed.
std::vector<at::Tensor> read_weights(
    const std::filesystem::path& path,
    const std::vector<WeightSpec>& specs,
    bool names_missing,
    const ExportedOptions& options);

} // namespace tessera::exported
