// A model as units: parameters that are gathered and freed together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/format/dtype.h"
#include "engine/layout.h"

namespace tessera::plan {

struct Param {
  std::string name; // below its unit
  engine::Shape shape;
  format::DType dtype = format::DType::Float32;

  int64_t numel() const; // throws TooLarge
};

/// What units of the same shapes have in common: a model of a hundred equal
/// layers has one kind for all of them.
struct UnitKind {
  std::vector<Param> params;

  int64_t numel() const;
};

struct NamedUnit {
  std::string name;
  size_t kind = 0; // in Model::kinds
};

/// Where a parameter is in a model.
struct ParamPlace {
  size_t unit = 0;
  size_t param = 0; // in its kind
};

struct Model {
  std::string description;
  std::vector<UnitKind> kinds;
  /// In the order of forward. The root, which has what is in no other unit,
  /// comes last; it may be without parameters.
  std::vector<NamedUnit> units;
  /// Tensors without gradient, which every rank has whole.
  int64_t buffer_bytes = 0;

  size_t root() const {
    return units.size() - 1;
  }
  const UnitKind& kind_of(size_t unit) const {
    return kinds[units[unit].kind];
  }
  int64_t numel() const;
  int64_t num_params() const;
};

} // namespace tessera::plan
