#pragma once

#include <tessera/api.h>
#include <tessera/data/dataset.h>
#include <tessera/data/order.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tessera::data {

/// A source of a mixture, for mixture_order().
struct TESSERA_API MixedSource {
  std::string name; // for errors and checkpoints
  int64_t size = 0; // samples
  double weight = 0; // relative to the other sources
};

/// An order that takes samples of several sources in proportion to their
/// weights. Which source comes at which place depends on the seed and on the
/// count of samples since the beginning of epoch 0; any stretch of the order
/// has each source almost exactly as often as its weight says. Each source goes
/// through all of its samples before it repeats one, in an order of its own
/// that is shuffled anew each time. Sources have indices one after another:
/// those of the second begin at the size of the first.
///
/// An epoch has `epoch_size` places; 0 for the sum of the sizes. Throws
/// c10::ValueError without a source, for an empty one, for names that are not
/// unique, and for weights that are not positive or vanish beside the others.
TESSERA_API std::shared_ptr<const Order> mixture_order(
    const std::vector<MixedSource>& sources,
    uint64_t seed,
    bool shuffle = true,
    int64_t epoch_size = 0);

/// Several data sets with the same type of sample as one, for Loader.
///
///   Mixture<TokenBatch> mixture;
///   mixture.add("books", TokenWindows(books, 128), 0.7)
///       .add("code", TokenWindows(code, 128), 0.3);
///   Loader loader(std::move(mixture), LoaderOptions().batch_size(8));
///
/// See mixture_order() for which sample comes when. Thread safety: that of the
/// data sets.
template <class Sample>
class Mixture {
 public:
  /// Adds a source: any type with size() and get(index).
  template <ReadsSamples Dataset>
  Mixture& add(std::string name, Dataset dataset, double weight) {
    const auto shared = std::make_shared<Dataset>(std::move(dataset));
    sources_.push_back({std::move(name), num_samples(*shared), weight});
    getters_.push_back([shared](int64_t index) -> Sample {
      return shared->get(static_cast<size_t>(index));
    });
    return *this;
  }
  /// Places in an epoch; default: the sum of the sizes.
  Mixture& epoch_size(int64_t size) {
    epoch_size_ = size;
    return *this;
  }

  /// Samples of all sources.
  int64_t size() const {
    int64_t sum = 0;
    for (const MixedSource& source : sources_) {
      sum += source.size;
    }
    return sum;
  }
  /// A sample by its index among all samples.
  Sample get(int64_t index) const {
    const auto [source, inside] = place_of(index);
    return getters_.at(source)(inside);
  }
  /// For Loader.
  std::shared_ptr<const Order> order(uint64_t seed, bool shuffle) const {
    return mixture_order(sources_, seed, shuffle, epoch_size_);
  }
  std::string describe_sample(int64_t index) const {
    const auto [source, inside] = place_of(index);
    return "sample " + std::to_string(inside) + " of source \"" +
        sources_.at(source).name + "\"";
  }

 private:
  std::pair<size_t, int64_t> place_of(int64_t index) const {
    size_t source = 0;
    while (source + 1 < sources_.size() && index >= sources_[source].size) {
      index -= sources_[source++].size;
    }
    return {source, index};
  }

  std::vector<MixedSource> sources_;
  std::vector<std::function<Sample(int64_t)>> getters_;
  int64_t epoch_size_ = 0;
};

} // namespace tessera::data
