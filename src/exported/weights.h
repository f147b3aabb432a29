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

/// Whether it is a parameter that gets a gradient.
bool is_trained(const WeightSpec& spec);

/// Two weights that are different tensors, but have elements in common: a
/// buffer that Python made of a parameter with detach(), for example.
struct SharedMemory {
  size_t one = 0;
  size_t other = 0;
};

/// All such pairs; `names_missing` is the archive's.
std::vector<SharedMemory> shared_memory(
    const std::vector<WeightSpec>& specs,
    bool names_missing);

/// "the parameter "a.weight" and the buffer "anchor""
std::string describe(
    const SharedMemory& shared,
    const std::vector<WeightSpec>& specs);

/// Reads all of these from the archive's file. Tensors of one payload share
/// their memory, and those that are tied are one tensor, also those whose bytes
/// the archive lacks, if it `names_missing` (Archive). Two of different kinds,
/// or of which one is frozen, are never one tensor. Parameters and buffers are
/// deferred, if the options say so. Throws checkpoint::FileError if the file
/// ends early or changed, c10::ValueError if the archive lacks a tensor's
/// bytes, unless that is allowed, and c10::NotImplementedError if a deferred
/// parameter shares its memory with another tensor.
std::vector<at::Tensor> read_weights(
    const std::filesystem::path& path,
    const std::vector<WeightSpec>& specs,
    bool names_missing,
    const ExportedOptions& options);

} // namespace tessera::exported
