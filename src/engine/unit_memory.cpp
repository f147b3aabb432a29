#include "engine/unit_memory.h"

#include <algorithm>

#include "engine/gather_order.h"

namespace tessera::engine {

bool shows_shard(const Unit& unit) {
  return std::all_of(
      unit.bundles().begin(), unit.bundles().end(), [](const Bundle& bundle) {
        return bundle.shows_shard();
      });
}

size_t full_bytes(const Unit& unit) {
  size_t bytes = 0;
  for (const Bundle& bundle : unit.bundles()) {
    if (!bundle.shows_shard()) {
      bytes += static_cast<size_t>(bundle.full().numel()) *
          bundle.full().element_size();
    }
  }
  return bytes;
}

int64_t allocated_numel(const Unit& unit) {
  int64_t numel = 0;
  for (const Bundle& bundle : unit.bundles()) {
    numel += static_cast<int64_t>(
        bundle.storage()->nbytes() / bundle.full().element_size());
  }
  return numel;
}

size_t shard_bytes(const Unit& unit) {
  size_t bytes = 0;
  for (const Bundle& bundle : unit.bundles()) {
    bytes += bundle.shard().nbytes();
  }
  return bytes;
}

size_t gradient_bytes(const Unit& unit) {
  size_t bytes = 0;
  for (const Bundle& bundle : unit.bundles()) {
    bytes += static_cast<size_t>(bundle.layout().travel_numel()) *
        c10::elementSize(bundle.gradients().reduce_dtype());
  }
  return bytes;
}

int64_t overlap_bytes(const Unit& unit) {
  const bool on_cpu = std::all_of(
      unit.bundles().begin(), unit.bundles().end(), [](const Bundle& bundle) {
        return bundle.full().is_cpu();
      });
  return unit.options().overlap_bytes.value_or(default_overlap_bytes(on_cpu));
}

size_t full_bytes_now(const Unit& unit) {
  size_t bytes = 0;
  for (const Bundle& bundle : unit.bundles()) {
    bytes += bundle.full_bytes_now();
  }
  return bytes;
}

size_t gradient_bytes_now(const Unit& unit) {
  size_t bytes = 0;
  for (const Bundle& bundle : unit.bundles()) {
    bytes += bundle.gradients().bytes_now();
  }
  return bytes;
}

} // namespace tessera::engine
