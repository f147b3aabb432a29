#include "exported/format/program.h"

namespace tessera::exported {

int64_t TreeSpec::num_leaves() const {
  if (kind == Kind::Leaf) {
    return 1;
  }
  int64_t leaves = 0;
  for (const auto& child : children) {
    leaves += child.num_leaves();
  }
  return leaves;
}

} // namespace tessera::exported
