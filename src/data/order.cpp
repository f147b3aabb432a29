#include <tessera/data/order.h>
#include <tessera/data/sampler.h>
#include <tessera/error.h>

#include <string>

#include "data/shuffle.h"

namespace tessera::data {
namespace {

void require_samples(int64_t size) {
  if (size < 1) {
    raise<c10::ValueError>(
        {.call = "data"},
        "the data set has " + std::to_string(size) +
            " samples, and at least 1 is needed. A data set that does not know its size is not supported.");
  }
}

class ShuffledOrder : public Order {
 public:
  ShuffledOrder(int64_t size, uint64_t seed) : size_(size), seed_(seed) {
    require_samples(size);
  }
  int64_t size() const override {
    return size_;
  }
  int64_t at(int64_t epoch, int64_t place) const override {
    return shuffled_at(place, size_, epoch_key(seed_, epoch));
  }
  StateDict identity() const override {
    return {
        {"kind", "shuffled"},
        {"size", size_},
        {"seed", static_cast<int64_t>(seed_)}};
  }

 private:
  const int64_t size_;
  const uint64_t seed_;
};

class SequentialOrder : public Order {
 public:
  explicit SequentialOrder(int64_t size) : size_(size) {
    require_samples(size);
  }
  int64_t size() const override {
    return size_;
  }
  int64_t at(int64_t /*epoch*/, int64_t place) const override {
    return place;
  }
  StateDict identity() const override {
    return {{"kind", "sequential"}, {"size", size_}};
  }

 private:
  const int64_t size_;
};

} // namespace

std::shared_ptr<const Order> shuffled_order(int64_t size, uint64_t seed) {
  return std::make_shared<ShuffledOrder>(size, seed);
}

std::shared_ptr<const Order> sequential_order(int64_t size) {
  return std::make_shared<SequentialOrder>(size);
}

std::shared_ptr<const Order> default_order(
    int64_t size,
    uint64_t seed,
    bool shuffle) {
  return shuffle ? shuffled_order(size, seed) : sequential_order(size);
}

} // namespace tessera::data
