#pragma once

#include <tessera/api.h>
#include <tessera/state/state_dict.h>

#include <cstdint>
#include <memory>

namespace tessera::data {

/// The order in which each epoch goes through samples. An order knows neither
/// ranks nor batches: all ranks of a run have equal orders, whatever their
/// number.
///
/// Thread safety: const functions may be called by several threads at once.
class TESSERA_API Order {
 public:
  virtual ~Order() = default;

  /// How many places an epoch has, at least one.
  virtual int64_t size() const = 0;
  /// The index of the sample at `place` (0 to size() - 1) of `epoch` (from 0).
  virtual int64_t at(int64_t epoch, int64_t place) const = 0;
  /// What decides the order, such as size and seed. Orders with equal
  /// identities are equal. The identity is saved with a position, and a
  /// position is refused by an order with another identity.
  virtual StateDict identity() const = 0;
};

/// Samples 0 to size - 1, each once per epoch, in an order that depends on
/// `seed` and on the epoch alone. No table is kept: a place is computed when it
/// is asked for. Throws c10::ValueError unless `size` is at least 1.
TESSERA_API std::shared_ptr<const Order> shuffled_order(
    int64_t size,
    uint64_t seed);

/// Samples 0 to size - 1 as they are numbered, in every epoch. Throws as
/// shuffled_order() does.
TESSERA_API std::shared_ptr<const Order> sequential_order(int64_t size);

} // namespace tessera::data
