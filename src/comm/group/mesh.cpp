#include <tessera/comm/agree.h>
#include <tessera/comm/init.h>
#include <tessera/comm/mesh.h>
#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "comm/group/group_impl.h"

namespace tessera {

struct Mesh::Data {
  std::vector<int64_t> shape;
  std::vector<std::string> names;
  std::vector<int64_t> coordinate;
  Group whole;
  std::vector<Group> axes; // by axis
};

namespace {

std::vector<int64_t> strides_of(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) {
    strides[i - 1] = strides[i] * shape[i];
  }
  return strides;
}

std::vector<int64_t> coordinate_of(
    int64_t rank,
    const std::vector<int64_t>& shape) {
  std::vector<int64_t> coordinate;
  const auto strides = strides_of(shape);
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    coordinate.push_back(rank / strides[axis] % shape[axis]);
  }
  return coordinate;
}

void check_shape(
    const Group& group,
    const std::vector<int64_t>& shape,
    const std::vector<std::string>& names) {
  const auto fail = [&](std::string_view what) {
    group.impl().raise_error<c10::ValueError>("make_mesh", what);
  };
  const int64_t needed = std::accumulate(
      shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  if (shape.empty() || std::any_of(shape.begin(), shape.end(), [](int64_t n) {
        return n < 1;
      })) {
    fail(fmt::format(
        "shape {{{}}} must name at least one axis, each of size 1 or more.",
        fmt::join(shape, ", ")));
  }
  if (needed != group.size()) {
    fail(fmt::format(
        "shape {{{}}} needs {} processes, the group has {}. Start {} with `tessera run -n {}` or change the shape.",
        fmt::join(shape, ", "),
        needed,
        group.size(),
        needed,
        needed));
  }
  auto sorted = names;
  std::sort(sorted.begin(), sorted.end());
  const bool unique =
      std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  if (names.size() != shape.size() || !unique || sorted.front().empty()) {
    fail(fmt::format(
        "the {} axes of shape {{{}}} need as many different names, found [{}].",
        shape.size(),
        fmt::join(shape, ", "),
        fmt::join(names, ", ")));
  }
}

/// Ranks that agree with this one on all axes but `axis` get one color.
int color_of(
    const std::vector<int64_t>& coordinate,
    const std::vector<int64_t>& shape,
    const std::vector<bool>& varies) {
  int64_t color = 0;
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    if (!varies[axis]) {
      color = color * shape[axis] + coordinate[axis];
    }
  }
  return static_cast<int>(color);
}

} // namespace

Mesh::Mesh(
    const Group& group,
    std::vector<int64_t> shape,
    std::vector<std::string> axis_names) {
  if (axis_names.empty()) {
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      axis_names.push_back(std::to_string(axis));
    }
  }
  agree(
      group,
      "make_mesh",
      {fmt::format("shape {{{}}}", fmt::join(shape, ", ")),
       fmt::format("axes [{}]", fmt::join(axis_names, ", "))});
  check_shape(group, shape, axis_names);

  auto data = std::make_shared<Data>();
  data->coordinate = coordinate_of(group.rank(), shape);
  data->whole = group;
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    if (shape[axis] == group.size()) {
      data->axes.push_back(group); // all others are 1 wide
      continue;
    }
    std::vector<bool> varies(shape.size(), false);
    varies[axis] = true;
    data->axes.push_back(*group.split(
        color_of(data->coordinate, shape, varies),
        group.rank(),
        axis_names[axis]));
  }
  data->shape = std::move(shape);
  data->names = std::move(axis_names);
  data_ = std::move(data);
}

Mesh::Mesh(std::shared_ptr<const Data> data) : data_(std::move(data)) {}

size_t Mesh::index_of(std::string_view axis, std::string_view call) const {
  const auto& names = data_->names;
  const auto found = std::find(names.begin(), names.end(), axis);
  if (found == names.end()) {
    data_->whole.impl().raise_error<c10::ValueError>(
        call,
        fmt::format(
            "this mesh has no axis \"{}\"; its axes are [{}].",
            axis,
            fmt::join(names, ", ")));
  }
  return static_cast<size_t>(found - names.begin());
}

int64_t Mesh::ndim() const {
  return static_cast<int64_t>(data_->shape.size());
}

int64_t Mesh::size() const {
  return data_->whole.size();
}

int64_t Mesh::size(std::string_view axis) const {
  return data_->shape[index_of(axis, "Mesh::size")];
}

const std::vector<int64_t>& Mesh::shape() const {
  return data_->shape;
}

const std::vector<std::string>& Mesh::axis_names() const {
  return data_->names;
}

const std::vector<int64_t>& Mesh::coordinate() const {
  return data_->coordinate;
}

int64_t Mesh::axis_rank(std::string_view axis) const {
  return data_->coordinate[index_of(axis, "Mesh::axis_rank")];
}

const Group& Mesh::group(std::string_view axis) const {
  return data_->axes[index_of(axis, "Mesh::group")];
}

const Group& Mesh::group() const {
  return data_->whole;
}

Mesh Mesh::submesh(const std::vector<std::string>& axes) const {
  if (axes.size() > 1) { // a group will be made
    agree(
        data_->whole,
        "submesh",
        {fmt::format("axes [{}]", fmt::join(axes, ", "))});
  }
  const size_t num_axes = data_->shape.size();
  auto data = std::make_shared<Data>();
  std::vector<bool> varies(num_axes, false);
  for (const std::string& axis : axes) {
    const size_t index = index_of(axis, "submesh");
    if (varies[index]) {
      data_->whole.impl().raise_error<c10::ValueError>(
          "submesh", fmt::format("axis \"{}\" is named twice.", axis));
    }
    varies[index] = true;
    data->shape.push_back(data_->shape[index]);
    data->names.push_back(axis);
    data->coordinate.push_back(data_->coordinate[index]);
    data->axes.push_back(data_->axes[index]);
  }
  if (axes.empty()) {
    data_->whole.impl().raise_error<c10::ValueError>(
        "submesh", "name at least one axis.");
  }
  if (axes.size() == 1) {
    data->whole = data->axes.front();
  } else {
    // Row-major in the order the axes were named.
    const auto strides = strides_of(data->shape);
    int64_t key = 0;
    for (size_t axis = 0; axis < axes.size(); ++axis) {
      key += strides[axis] * data->coordinate[axis];
    }
    data->whole = *data_->whole.split(
        color_of(data_->coordinate, data_->shape, varies),
        static_cast<int>(key),
        fmt::format("{}", fmt::join(axes, "+")));
  }
  return Mesh(std::move(data));
}

Mesh Mesh::operator[](const std::string& axis) const {
  return submesh({axis});
}

const std::vector<int>& Mesh::global_ranks() const {
  return data_->whole.global_ranks();
}

std::string Mesh::to_string() const {
  std::string text = "Mesh(";
  for (size_t axis = 0; axis < data_->shape.size(); ++axis) {
    text += fmt::format(
        "{}{}={}",
        axis == 0 ? "" : ", ",
        data_->names[axis],
        data_->shape[axis]);
  }
  return text + ")";
}

Mesh make_mesh(
    std::vector<int64_t> shape,
    std::vector<std::string> axis_names) {
  return Mesh(world(), std::move(shape), std::move(axis_names));
}

} // namespace tessera
