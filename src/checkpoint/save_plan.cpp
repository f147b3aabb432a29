#include "checkpoint/save_plan.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "checkpoint/error_lines.h"

namespace tessera::checkpoint {

namespace {

/// About how many bytes a torch file has around its data.
constexpr uint64_t kFrameBytes = 1300;
/// How many lines one error may have.
constexpr size_t kMaxConflicts = 8;

std::string describe(const Claim& claim) {
  if (claim.kind == ClaimKind::Value) {
    return "a plain value";
  }
  return fmt::format(
      "a {}tensor of {}, [{}]",
      claim.kind == ClaimKind::Sharded ? "sharded " : "",
      format::info(claim.dtype).torch_name,
      fmt::join(claim.sizes, ", "));
}

[[noreturn]] void disagree(const std::string& name, const std::string& what) {
  raise<DisagreementError>({.call = "save"}, '"' + name + "\": " + what);
}

bool boxes_overlap(const ShardedTensor::Box& a, const ShardedTensor::Box& b) {
  for (size_t dim = 0; dim < a.sizes.size(); ++dim) {
    if (a.offsets[dim] + a.sizes[dim] <= b.offsets[dim] ||
        b.offsets[dim] + b.sizes[dim] <= a.offsets[dim]) {
      return false;
    }
  }
  return true;
}

} // namespace

SavePlan::SavePlan(const std::vector<const std::vector<Claim>*>& claims) {
  for (size_t rank = 0; rank < claims.size(); ++rank) {
    size_t unit = 0;
    for (const Claim& claim : *claims[rank]) {
      merge(claim, static_cast<int>(rank), unit);
      unit += claim.num_units();
    }
    duties_.emplace_back(unit);
  }
  for (const Entry& entry : entries_) {
    check_cover(entry);
  }
  assign(claims.size());
}

void SavePlan::merge(const Claim& claim, int rank, size_t first_unit) {
  const auto [found, is_new] =
      by_name_.try_emplace(claim.name, entries_.size());
  if (is_new) {
    entries_.push_back({.claim = &claim, .rank = rank});
  }
  Entry& entry = entries_[found->second];
  const Claim& first = *entry.claim;
  entry.is_of_any_rank = entry.is_of_any_rank || claim.is_of_any_rank;
  entry.is_mixed = entry.is_mixed || claim.is_on_host != first.is_on_host;
  if (claim.kind != first.kind ||
      (claim.kind != ClaimKind::Value &&
       (claim.dtype != first.dtype || claim.sizes != first.sizes))) {
    disagree(
        claim.name,
        fmt::format(
            "rank {} has {}, rank {} {}. Save the same thing under one name, or put the rank into the name.",
            entry.rank,
            describe(first),
            rank,
            describe(claim)));
  }
  if (claim.kind == ClaimKind::Value && claim.value_sum != first.value_sum) {
    disagree(
        claim.name,
        fmt::format(
            "rank {} and rank {} have different values, so nothing was saved. Save the same value on all ranks, or put the rank into its name.",
            entry.rank,
            rank));
  }
  for (size_t i = 0; i < claim.num_units(); ++i) {
    const ShardedTensor::Box box =
        claim.kind == ClaimKind::Value ? ShardedTensor::Box{} : claim.boxes[i];
    const auto [unit, is_new_box] =
        entry.by_offset.try_emplace(box.offsets, entry.units.size());
    if (is_new_box) {
      const uint64_t data = claim.kind == ClaimKind::Value
          ? claim.value_bytes
          : static_cast<uint64_t>(
                box.numel() * format::element_bytes(claim.dtype));
      entry.units.push_back({.box = box, .bytes = data + kFrameBytes});
    } else if (entry.units[unit->second].box != box) {
      disagree(
          claim.name,
          fmt::format(
              "boxes of several ranks begin at [{}] and have different sizes. They must be the same or not overlap.",
              fmt::join(box.offsets, ", ")));
    }
    entry.units[unit->second].holders.push_back({rank, first_unit + i});
  }
}

void SavePlan::check_cover(const Entry& entry) const {
  if (entry.claim->kind != ClaimKind::Sharded) {
    return;
  }
  int64_t covered = 0;
  for (const Unit& unit : entry.units) {
    covered += unit.box.numel();
  }
  const std::vector<int64_t>& sizes = entry.claim->sizes;
  const int64_t numel = std::accumulate(
      sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  bool overlap = false;
  // Sorted by offset, so by dim 0 first: only neighbours that share rows are
  // compared.
  std::vector<const ShardedTensor::Box*> open;
  for (const auto& [offsets, index] : entry.by_offset) {
    const ShardedTensor::Box& box = entry.units[index].box;
    if (box.offsets.empty()) {
      break;
    }
    std::erase_if(open, [&](const ShardedTensor::Box* other) {
      return other->offsets[0] + other->sizes[0] <= box.offsets[0];
    });
    overlap =
        overlap ||
        std::any_of(
            open.begin(), open.end(), [&](const ShardedTensor::Box* other) {
              return boxes_overlap(*other, box);
            });
    open.push_back(&box);
  }
  if (overlap || covered != numel) {
    disagree(
        entry.claim->name,
        fmt::format(
            "the boxes of all ranks {} of {} elements. Every rank that has a part must save it, in one group.",
            overlap ? "overlap; they cover" : fmt::format("cover {}", covered),
            numel));
  }
}

void SavePlan::assign(size_t num_ranks) {
  std::vector<uint64_t> load(num_ranks, 0);
  std::vector<Unit*> shared;
  const auto give = [&](Unit& unit, const Holder& holder) {
    unit.writer = holder;
    load[static_cast<size_t>(holder.rank)] += unit.bytes;
    duty_of(holder).writes = true;
    total_bytes_ += unit.bytes;
  };
  for (Entry& entry : entries_) {
    for (Unit& unit : entry.units) {
      if (unit.holders.size() == 1 || entry.is_of_any_rank) {
        give(unit, unit.holders.front());
        continue;
      }
      shared.push_back(&unit);
      if (entry.claim->kind != ClaimKind::Value) {
        for (const Holder& holder : unit.holders) {
          duty_of(holder).compares = true;
          duty_of(holder).compares_on_host = entry.is_mixed;
        }
      }
    }
  }
  std::stable_sort(
      shared.begin(), shared.end(), [](const Unit* a, const Unit* b) {
        return a->bytes > b->bytes;
      });
  for (Unit* unit : shared) {
    give(
        *unit,
        *std::min_element(
            unit->holders.begin(),
            unit->holders.end(),
            [&](const Holder& a, const Holder& b) {
              return load[static_cast<size_t>(a.rank)] <
                  load[static_cast<size_t>(b.rank)];
            }));
  }
}

Duty& SavePlan::duty_of(const Holder& holder) {
  return duties_[static_cast<size_t>(holder.rank)][holder.unit];
}

void SavePlan::check_copies(const std::vector<RankResult>& results) const {
  // Units that a rank does not compare have no digest.
  std::vector<std::vector<uint64_t>> digests(duties_.size());
  for (size_t rank = 0; rank < duties_.size(); ++rank) {
    size_t next = 0;
    for (const Duty& duty : duties_[rank]) {
      digests[rank].push_back(
          duty.compares ? results[rank].digests.at(next++) : 0);
    }
  }
  const auto digest_of = [&](const Holder& holder) {
    return digests[static_cast<size_t>(holder.rank)][holder.unit];
  };
  std::vector<std::string> lines;
  for (const Entry& entry : entries_) {
    std::set<int> others;
    for (const Unit& unit : entry.units) {
      for (const Holder& holder : unit.holders) {
        if (digest_of(holder) != digest_of(unit.holders.front())) {
          others.insert(holder.rank);
        }
      }
    }
    if (!others.empty()) {
      lines.push_back(fmt::format(
          "\"{}\": rank{} {} against rank {}",
          entry.claim->name,
          others.size() == 1 ? "" : "s",
          fmt::join(others, ", "),
          entry.units.front().holders.front().rank));
    }
  }
  if (!lines.empty()) {
    raise<DisagreementError>(
        {.call = "save"},
        fmt::format(
            "ranks have different values of tensors that only one of them would write, so nothing was saved:{}\n"
            "If a rank has a part of a sharded tensor, its state or its gradient, save what tessera::get_state_dict(model, optimizers) or a TrainingState gives. "
            "If each rank has a tensor of its own, put the rank into its name. "
            "If the values of any rank are good enough, save StateValue::of_any_rank(tensor).",
            first_lines(lines, kMaxConflicts)));
  }
}

format::DcpMetadata SavePlan::metadata(
    const std::vector<RankResult>& results) const {
  // Units that a rank does not write have no result.
  std::vector<std::vector<const Written*>> written(duties_.size());
  for (size_t rank = 0; rank < duties_.size(); ++rank) {
    size_t next = 0;
    for (const Duty& duty : duties_[rank]) {
      written[rank].push_back(
          duty.writes ? &results[rank].units.at(next++) : nullptr);
    }
  }
  const auto storage_of = [&](const Unit& unit) {
    const auto rank = static_cast<size_t>(unit.writer.rank);
    const Written& place = *written[rank][unit.writer.unit];
    return format::DcpStorage{
        .file = data_file_name(unit.writer.rank, place.file),
        .offset = static_cast<int64_t>(place.offset),
        .length = static_cast<int64_t>(place.length)};
  };
  format::DcpMetadata metadata;
  metadata.paths.emplace();
  metadata.version = "1.0.0";
  for (const Entry& entry : entries_) {
    const Claim& claim = *entry.claim;
    metadata.paths->push_back({claim.name, claim.keys});
    if (claim.kind == ClaimKind::Value) {
      metadata.bytes.push_back({claim.name, storage_of(entry.units.front())});
      continue;
    }
    format::DcpTensor tensor;
    tensor.name = claim.name;
    tensor.dtype = claim.dtype;
    tensor.sizes = claim.sizes;
    for (const Unit& unit : entry.units) {
      tensor.chunks.push_back(
          {unit.box.offsets, unit.box.sizes, storage_of(unit)});
    }
    metadata.tensors.push_back(std::move(tensor));
  }
  return metadata;
}

} // namespace tessera::checkpoint
