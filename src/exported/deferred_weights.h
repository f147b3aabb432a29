// Weights that are read from the archive when they are needed.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>

#include "exported/format/program.h"

namespace tessera::exported {

/// [Note: deferred weights]
///
/// Under DeferredInit, tensors have a tape in place of memory. So that a weight
/// can be one of them, reading it is an operator of its own,
/// tessera::read_exported, which the tape records as it records any factory.
/// fully_shard() repeats it for one parameter at a time: no rank ever holds the
/// whole model. The recorded operator names the file by its path: the file must
/// stay where it is until then.
///
/// The operator has an overload for a range of elements, so a rank reads the
/// elements that its shards have, and no others. Three kinds of weights are
/// read whole, one at a time, before the part is taken: a transposed one or one
/// with other strides (what lies between its first and its last element), one
/// that was written to since it was loaded, and one of an archive that was
/// written without checksums, unless compare_start(false) was set.
///
/// The ranks compare what they begin with by the archives' checksums then,
/// which Python's writer computes. Nothing compares these with the bytes.

/// The tensor of a payload, by the operator. Inside a DeferredInit, it is a
/// deferred tensor.
at::Tensor read_by_operator(
    const std::filesystem::path& path,
    const Payload& payload,
    at::Device device);

} // namespace tessera::exported
