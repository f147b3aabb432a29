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
/// fully_shard() repeats it for one parameter at a time and keeps this rank's
/// part: no rank ever holds the whole model. The recorded operator names the
/// file by its path: the file must stay where it is until then.

/// The tensor of a payload, by the operator. Inside a DeferredInit, it is a
/// deferred tensor.
at::Tensor read_by_operator(
    const std::filesystem::path& path,
    const Payload& payload,
    at::Device device);

} // namespace tessera::exported
