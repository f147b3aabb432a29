#include <tessera/data/mixture.h>
#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <cmath>
#include <set>

#include "data/even_choice.h"
#include "data/shuffle.h"

namespace tessera::data {
namespace {

std::vector<double> weights_of(const std::vector<MixedSource>& sources) {
  std::vector<double> weights;
  for (const MixedSource& source : sources) {
    weights.push_back(source.weight);
  }
  return weights;
}

class MixtureOrder : public Order {
 public:
  MixtureOrder(
      std::vector<MixedSource> sources,
      uint64_t seed,
      bool shuffle,
      int64_t epoch_size)
      : sources_(std::move(sources)),
        seed_(seed),
        shuffle_(shuffle),
        choice_(weights_of(sources_), mix_bits(seed, 0)) {
    int64_t offset = 0;
    for (const MixedSource& source : sources_) {
      offsets_.push_back(offset);
      offset += source.size;
    }
    size_ = epoch_size > 0 ? epoch_size : offset;
    if (!choice_.is_valid()) {
      raise<c10::ValueError>(
          {.call = "Mixture"},
          "the weight of a source is less than a billionth of the sum of all weights. Leave the source out, or raise its weight.");
    }
  }

  int64_t size() const override {
    return size_;
  }

  int64_t at(int64_t epoch, int64_t place) const override {
    const auto [which, earlier] = choice_.at(epoch * size_ + place);
    const int64_t own_size = sources_[which].size;
    const int64_t own_place = earlier % own_size;
    if (!shuffle_) {
      return offsets_[which] + own_place;
    }
    const uint64_t own_seed = mix_bits(seed_, ~static_cast<uint64_t>(which));
    const uint64_t key = epoch_key(own_seed, earlier / own_size);
    return offsets_[which] + shuffled_at(own_place, own_size, key);
  }

  StateDict identity() const override {
    StateDict sources;
    int64_t place = 0; // dictionaries are equal in any order, mixtures are not
    for (const MixedSource& source : sources_) {
      sources.set(
          source.name,
          StateDict{
              {"place", place++},
              {"size", source.size},
              {"weight", source.weight}});
    }
    return {
        {"kind", shuffle_ ? "shuffled mixture" : "sequential mixture"},
        {"size", size_},
        {"seed", static_cast<int64_t>(seed_)},
        {"sources", std::move(sources)}};
  }

 private:
  const std::vector<MixedSource> sources_;
  const uint64_t seed_;
  const bool shuffle_;
  const EvenChoice choice_;
  std::vector<int64_t> offsets_; // of the sources, among all indices
  int64_t size_ = 0;
};

} // namespace

std::shared_ptr<const Order> mixture_order(
    const std::vector<MixedSource>& sources,
    uint64_t seed,
    bool shuffle,
    int64_t epoch_size) {
  const auto refuse = [](const std::string& what) {
    raise<c10::ValueError>({.call = "Mixture"}, what);
  };
  if (sources.empty()) {
    refuse("a mixture without sources. Add at least one.");
  }
  if (epoch_size < 0) {
    refuse(fmt::format(
        "an epoch of {} places. Give at least 1, or 0 for the sum of all sizes.",
        epoch_size));
  }
  std::set<std::string> names;
  for (const MixedSource& source : sources) {
    if (source.size < 1) {
      refuse(fmt::format(
          "the source \"{}\" has {} samples. Leave out sources without samples.",
          source.name,
          source.size));
    }
    if (!std::isfinite(source.weight) || source.weight <= 0) {
      refuse(fmt::format(
          "the source \"{}\" has the weight {}. Weights are positive numbers.",
          source.name,
          source.weight));
    }
    if (source.name.empty() || !names.insert(source.name).second) {
      refuse(fmt::format(
          "two sources have the name \"{}\", or a source has none. Give each source a name of its own.",
          source.name));
    }
  }
  return std::make_shared<MixtureOrder>(sources, seed, shuffle, epoch_size);
}

} // namespace tessera::data
