// The bytes of TensorBoard's event files: records as TensorFlow frames them,
// each with one Event in protobuf's wire format.
#pragma once

#include <tessera/train/event_writer.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tessera::train {

/// Length, checksum of the length, payload, checksum of the payload; numbers
/// are little-endian, checksums are masked CRC-32Cs.
std::string framed(std::string_view payload);

/// The first event of a file: tells readers its version.
std::string version_event(double wall_time);
/// A run (re)starts: readers hide what earlier files have of `step` and later
/// ones.
std::string restart_event(double wall_time, int64_t step);
std::string scalars_event(
    double wall_time,
    int64_t step,
    std::span<const EventScalar> scalars);

} // namespace tessera::train
