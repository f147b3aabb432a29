// The shapes of a program's tensors, for a batch and a length.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "exported/format/program.h"
#include "exported/format/size_expression.h"
#include "plan/activations/shape.h"

namespace tessera::plan {

/// What `--batch` and `--length` set: the first and the second dimension of
/// inputs. Empty: the sizes of the sample at the export.
struct InputSizes {
  std::optional<int64_t> batch = std::nullopt;
  std::optional<int64_t> length = std::nullopt;
};

/// The batches that a program takes.
struct BatchRange {
  int64_t least = 1;
  int64_t most = 1;
};
BatchRange batch_range(const exported::Program& program);

class GraphSizes {
 public:
  /// Throws PlanError if a dimension is not dynamic, or out of its range.
  GraphSizes(const exported::Program& program, const InputSizes& inputs);

  /// Throws exported::UnknownSize for sizes that depend on data.
  TensorShape shape_of(const exported::TensorMeta& meta) const;

  /// The batch and the length that are planned, where they are dynamic.
  const InputSizes& chosen() const {
    return chosen_;
  }

 private:
  void set(
      const exported::Program& program,
      const char* flag,
      size_t dim,
      std::optional<int64_t> wanted,
      std::optional<int64_t>& chosen);

  exported::SymbolValues symbols_;
  InputSizes chosen_;
};

} // namespace tessera::plan
