// Equality of states, and where two states differ.
#include <tessera/state/state_dict.h>

#include <ATen/ops/isclose.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/ones_like.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "state/describe.h"

namespace tessera {
namespace {

at::Tensor on_cpu(const at::Tensor& tensor) {
  return tensor.detach().cpu().contiguous();
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) {
    return a.defined() == b.defined();
  }
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) {
    return false;
  }
  const at::Tensor left = on_cpu(a);
  const at::Tensor right = on_cpu(b);
  return left.numel() == 0 ||
      std::memcmp(
          left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

bool same_pieces(const ShardedTensor& a, const ShardedTensor& b) {
  if (a.sizes() != b.sizes() || a.dtype() != b.dtype() ||
      a.pieces().size() != b.pieces().size()) {
    return false;
  }
  for (size_t i = 0; i < a.pieces().size(); ++i) {
    if (a.pieces()[i].box != b.pieces()[i].box) {
      return false;
    }
  }
  return true;
}

/// Collects a line for each difference.
class Differ {
 public:
  Differ(const DiffTolerance& tolerance, size_t max_lines)
      : tolerance_(tolerance), max_lines_(max_lines) {}

  void compare(
      const std::string& path,
      const StateDict& a,
      const StateDict& b) {
    for (const auto& [key, value] : a) {
      const std::string below = join(path, key);
      if (const StateValue* other = b.find(key)) {
        compare(below, value, *other);
      } else {
        say(below, "only in the first");
      }
    }
    for (const auto& [key, value] : b) {
      if (!a.contains(key)) {
        say(join(path, key), "only in the second");
      }
    }
  }

  std::string text() const {
    return num_lines_ <= max_lines_
        ? text_
        : text_ + fmt::format("and {} more\n", num_lines_ - max_lines_);
  }

 private:
  static std::string join(const std::string& path, const StateKey& key) {
    return path.empty() ? key.text() : path + "." + key.text();
  }

  void say(const std::string& path, const std::string& what) {
    if (++num_lines_ <= max_lines_) {
      text_ += path + ": " + what + "\n";
    }
  }

  void compare(
      const std::string& path,
      const StateValue& a,
      const StateValue& b) {
    if (std::string_view(a.kind()) != b.kind()) {
      say(path,
          fmt::format("{} against {}", state::describe(a), state::describe(b)));
    } else if (a.is_dict()) {
      compare(path, a.dict(), b.dict());
    } else if (a.is_list()) {
      compare(path, a.list(), b.list());
    } else if (a.is_tensor()) {
      compare(path, a.tensor(), b.tensor(), {});
    } else if (a.is_sharded()) {
      compare(path, a.sharded(), b.sharded());
    } else if (a.is_double() ? !close(a.to_double(), b.to_double()) : a != b) {
      say(path,
          fmt::format("{} against {}", state::describe(a), state::describe(b)));
    }
  }

  bool close(double a, double b) const {
    return a == b || (tolerance_.equal_nan && std::isnan(a) && std::isnan(b)) ||
        std::abs(a - b) <= tolerance_.atol + tolerance_.rtol * std::abs(b);
  }

  void compare(
      const std::string& path,
      const StateList& a,
      const StateList& b) {
    if (a.size() != b.size()) {
      say(path, fmt::format("{} items against {}", a.size(), b.size()));
      return;
    }
    for (size_t i = 0; i < a.size(); ++i) {
      compare(join(path, i), a[i], b[i]);
    }
  }

  void compare(
      const std::string& path,
      const ShardedTensor& a,
      const ShardedTensor& b) {
    if (!same_pieces(a, b)) {
      say(path,
          fmt::format("{} against {}", state::describe(a), state::describe(b)));
      return;
    }
    for (size_t i = 0; i < a.pieces().size(); ++i) {
      compare(
          path,
          a.pieces()[i].tensor,
          b.pieces()[i].tensor,
          a.pieces()[i].box.offsets);
    }
  }

  /// `offsets`: where the tensors begin in the tensor they are pieces of.
  void compare(
      const std::string& path,
      const at::Tensor& a,
      const at::Tensor& b,
      const std::vector<int64_t>& offsets) {
    if (same_bits(a, b)) {
      return;
    }
    if (!a.defined() || !b.defined() || a.sizes() != b.sizes() ||
        a.scalar_type() != b.scalar_type()) {
      say(path,
          fmt::format("{} against {}", state::describe(a), state::describe(b)));
      return;
    }
    const at::Tensor left = on_cpu(a);
    const at::Tensor right = on_cpu(b);
    const at::Tensor differs =
        at::isclose(
            left, right, tolerance_.rtol, tolerance_.atol, tolerance_.equal_nan)
            .logical_not();
    const at::Tensor where = differs.nonzero();
    if (where.size(0) == 0) {
      return;
    }
    at::Tensor x = left;
    at::Tensor y = right;
    std::vector<int64_t> place;
    for (int64_t dim = 0; dim < left.dim(); ++dim) {
      const auto at = where[0][dim].item<int64_t>();
      x = x[at];
      y = y[at];
      place.push_back(
          at + (offsets.empty() ? 0 : offsets[static_cast<size_t>(dim)]));
    }
    say(path,
        fmt::format(
            "{}{} against {}{}",
            place.empty() ? ""
                : place.size() == 1
                ? fmt::format("element {}: ", place[0])
                : fmt::format("element [{}]: ", fmt::join(place, ", ")),
            state::number(x),
            state::number(y),
            where.size(0) > 1 ? fmt::format(
                                    " ({} of {} elements differ)",
                                    where.size(0),
                                    left.numel())
                              : ""));
  }

  const DiffTolerance tolerance_;
  const size_t max_lines_;
  size_t num_lines_ = 0;
  std::string text_;
};

} // namespace

bool StateValue::operator==(const StateValue& other) const {
  if (value_.index() != other.value_.index()) {
    return false;
  }
  if (is_tensor()) {
    return same_bits(tensor(), other.tensor());
  }
  if (is_sharded()) {
    const auto& a = sharded();
    const auto& b = other.sharded();
    if (!same_pieces(a, b)) {
      return false;
    }
    for (size_t i = 0; i < a.pieces().size(); ++i) {
      if (!same_bits(a.pieces()[i].tensor, b.pieces()[i].tensor)) {
        return false;
      }
    }
    return true;
  }
  if (is_dict()) {
    return dict() == other.dict();
  }
  if (is_double()) { // bitwise: NaN equals NaN
    return std::bit_cast<uint64_t>(std::get<double>(value_)) ==
        std::bit_cast<uint64_t>(std::get<double>(other.value_));
  }
  return is_none() || (is_int() && to_int() == other.to_int()) ||
      (is_bool() && to_bool() == other.to_bool()) ||
      (is_string() && string() == other.string()) ||
      (is_list() && list() == other.list());
}

bool StateDict::operator==(const StateDict& other) const {
  if (size() != other.size()) {
    return false;
  }
  for (const auto& [key, value] : *this) {
    const StateValue* match = other.find(key);
    if (match == nullptr || *match != value) {
      return false;
    }
  }
  return true;
}

std::string diff_state_dicts(
    const StateDict& a,
    const StateDict& b,
    const DiffTolerance& tolerance,
    size_t max_lines) {
  Differ differ(tolerance, max_lines);
  differ.compare("", a, b);
  return differ.text();
}

} // namespace tessera
