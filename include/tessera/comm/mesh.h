#pragma once

#include <tessera/api.h>
#include <tessera/comm/group.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Ranks in a grid with named axes, row-major: the last axis varies fastest,
/// so consecutive ranks are neighbours on it. A cheap handle.
class TESSERA_API Mesh {
 public:
  /// Lays the ranks of `group` out as `shape`. Names must be unique and not
  /// empty; without names the axes are called "0", "1", ... Collective over the
  /// group: creates one group per axis.
  Mesh(
      const Group& group,
      std::vector<int64_t> shape,
      std::vector<std::string> axis_names = {});

  int64_t ndim() const; // axes
  int64_t size() const; // ranks in all
  int64_t size(std::string_view axis) const; // ranks on that axis
  const std::vector<int64_t>& shape() const; // ranks on each axis
  const std::vector<std::string>& axis_names() const; // first to last

  /// This rank's place on each axis, or on one.
  const std::vector<int64_t>& coordinate() const;
  int64_t axis_rank(std::string_view axis) const;

  /// The ranks that differ from this one only on `axis`.
  const Group& group(std::string_view axis) const;
  /// All ranks of the mesh.
  const Group& group() const;

  /// The mesh of some axes, in the given order, at this rank's place on the
  /// others. Collective over the mesh if more than one axis is named, since a
  /// group is created.
  Mesh submesh(const std::vector<std::string>& axes) const;
  /// The mesh of one axis. Not collective.
  Mesh operator[](const std::string& axis) const;

  /// Ranks of the world, row-major.
  const std::vector<int>& global_ranks() const;
  /// "Mesh(dp=2, tp=4)".
  std::string to_string() const;

 private:
  struct Data;
  explicit Mesh(std::shared_ptr<const Data> data);
  size_t index_of(std::string_view axis, std::string_view call) const;

  std::shared_ptr<const Data> data_;
};

/// Mesh over the world. Collective.
TESSERA_API Mesh
make_mesh(std::vector<int64_t> shape, std::vector<std::string> axis_names = {});

} // namespace tessera
