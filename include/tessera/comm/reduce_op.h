#pragma once

namespace tessera {

/// How the values of several ranks are combined into one. For bool, Sum and Max
/// are "or", Min is "and". Avg divides the sum by the number of ranks; it is
/// refused for integers and bool.
enum class ReduceOp {
  Sum, // of all ranks
  Avg, // that, divided by their number
  Min, // the smallest
  Max, // the largest
};

} // namespace tessera
