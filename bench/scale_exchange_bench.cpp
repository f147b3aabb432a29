// What ranks tell each other before state moves, against the number of ranks:
// when optimizer state is taken, and when a save is planned. One process stands
// for all ranks; nothing is sent.
//
//   scale_exchange_bench 16384
//
// `bytes` is what a rank receives (of a save: rank 0), `time` what it computes.
// The peer sends every rank's description whole.
#include <tessera/comm/init.h>
#include <tessera/state/state_dict.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/claim_sets.h"
#include "checkpoint/save_plan.h"
#include "engine/boxes.h"
#include "engine/layout.h"
#include "harness.h"
#include "transfer/state_census.h"

namespace {

using tessera::Bytes;
using tessera::StateDict;
namespace checkpoint = tessera::checkpoint;
namespace engine = tessera::engine;

constexpr size_t kParams = 1000;
constexpr int kRepeats = 5;

std::string name_of(size_t param) {
  return "layers." + std::to_string(param / 4) + ".weight" +
      std::to_string(param % 4);
}

bench::Row row(const char* what, const char* unit, int ranks) {
  return {
      "scale/" + std::string(what) + "/w" + std::to_string(ranks), unit, {}};
}

/// AdamW's state, of which every rank has a part for every parameter.
void take_optimizer_state(const tessera::Group& world, int repeats) {
  bench::Row bytes = row("catalogue-bytes", "MB", world.size());
  bench::Row time = row("catalogue-time", "ms", world.size());
  const StateDict entry{
      {"tensors", StateDict{{"exp_avg", 6}, {"exp_avg_sq", 6}}},
      {"values", StateDict{{"step", 10.0}}}};
  StateDict catalogue;
  for (size_t param = 0; param < kParams; ++param) {
    catalogue.set(name_of(param), entry);
  }
  for (int repeat = 0; repeat < repeats; ++repeat) {
    double received = 0;
    time.ours.push_back(bench::milliseconds([&] {
      tessera::transfer::StateCensus census(kParams, world.rank());
      for (size_t param = 0; param < kParams; ++param) {
        census.count(param, 64, true, tessera::state_dict_to_bytes(entry));
      }
      census.exchange(world);
      for (size_t param = 0; param < kParams; ++param) {
        tessera::state_dict_from_bytes(census.description(param));
      }
      received = static_cast<double>(census.wire_bytes());
    }));
    bytes.ours.push_back(received / 1e6);
    bytes.peers["whole"].push_back(
        static_cast<double>(tessera::state_dict_to_bytes(catalogue).size()) *
        world.size() / 1e6);
  }
  bench::print(bytes);
  bench::print(time);
}

/// What a rank says of a model that is cut into equal ranges.
std::vector<checkpoint::Claim> claims_of(
    const engine::Layout& layout,
    int rank) {
  std::vector<checkpoint::Claim> claims;
  for (size_t param = 0; param < layout.num_params(); ++param) {
    const engine::Run run = layout.run(param, rank);
    checkpoint::Claim claim;
    claim.name = name_of(param);
    claim.keys = {claim.name};
    claim.kind = checkpoint::ClaimKind::Sharded;
    claim.sizes = layout.shape(param);
    claim.boxes =
        engine::boxes_of(layout.shape(param), run.param_begin, run.numel);
    claims.push_back(std::move(claim));
  }
  return claims;
}

/// A model of a billion elements in equal ranges.
void plan_save(int ranks, int repeats) {
  bench::Row bytes = row("save-plan-bytes", "MB", ranks);
  bench::Row time = row("save-plan-time", "ms", ranks);
  const engine::Layout layout(
      engine::Layout::Kind::Flat,
      std::vector<engine::Shape>(kParams, {1024, 1024}),
      ranks);
  // As Peers::gather_distinct() gives them. No rank has values.
  std::vector<Bytes> texts{checkpoint::pack(claims_of(layout, 0)).heads, {}};
  std::vector<checkpoint::ClaimSets::Place> places;
  double received = static_cast<double>(texts.front().size());
  double whole = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    Bytes boxes = checkpoint::pack(claims_of(layout, rank)).boxes;
    received += static_cast<double>(boxes.size()) + 4 * 16; // and digests
    whole += static_cast<double>(boxes.size() + texts.front().size());
    places.push_back({.heads = 0, .boxes = texts.size(), .others = 1});
    texts.push_back(std::move(boxes));
  }
  for (int repeat = 0; repeat < repeats; ++repeat) {
    time.ours.push_back(bench::milliseconds([&] {
      checkpoint::ClaimSets claims;
      for (const auto& place : places) {
        claims.add(texts, place);
      }
      const checkpoint::SavePlan plan(claims.by_rank());
    }));
    bytes.ours.push_back(received / 1e6);
    bytes.peers["whole"].push_back(whole / 1e6);
  }
  bench::print(bytes);
  bench::print(time);
}

} // namespace

int main(int argc, char** argv) {
  const bench::Arguments arguments(argc, argv);
  const int ranks = std::stoi(arguments.word(0, "8"));
  const auto world = tessera::init(tessera::InitOptions()
                                       .backend("fake")
                                       .rank(0)
                                       .world_size(ranks)
                                       .local_rank(0));
  take_optimizer_state(world, arguments.times(kRepeats));
  plan_save(ranks, arguments.times(kRepeats));
  return 0;
}
