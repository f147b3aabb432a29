#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/disk/source.h"
#include "checkpoint/tools/progress_meter.h"

namespace tessera::checkpoint {

struct DiffOptions {
  /// Without a tolerance every bit counts, and so does the dtype. With a
  /// tolerance, elements may differ by atol + rtol * |b|, and dtypes may
  /// differ.
  std::optional<double> rtol;
  std::optional<double> atol;
  /// Any NaN equals any other, whatever its bits; with a tolerance this is
  /// always so.
  bool equal_nan = false;
  /// Names that begin with one of these, up to a dot, are ignored.
  std::vector<std::string> exclude;
};

struct Difference {
  std::string name;
  std::string text; // what differs, for people
  /// Only for tensors whose elements were compared.
  struct Elements {
    int64_t num_different = 0;
    int64_t num_all = 0;
    double max_abs = 0; // NaN where one of two elements is
    double max_rel = 0;
  };
  std::optional<Elements> elements;
};

struct DiffReport {
  size_t num_same = 0; // tensors and values
  size_t num_excluded = 0; // names, of both
  std::vector<Difference> differences; // one for each name that differs
};

/// As JSON.
std::string diff_json(const DiffReport& report);

/// Throws FileError, DamageError.
DiffReport diff(
    const Source& a,
    const Source& b,
    const DiffOptions& options,
    ProgressMeter& progress);

} // namespace tessera::checkpoint
