// State moves from any sharding to any other, and training continues as if it
// had not moved.
//
// Each run is a number, which determines the model, the source, the target and
// the way. TESSERA_ANY_TO_ANY=BEGIN:END runs those numbers instead of the few
// of every test run:
//
//   TESSERA_ANY_TO_ANY=0:5000 fsdp_state_test --gtest_filter='AnyToAny*'
#include <tessera/comm/mesh.h>
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/optim/adam.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/sgd.h>
#include <tessera/optim/state_dict.h>
#include <tessera/transfer/distributed_state_dict.h>
#include <tessera/transfer/model_state.h>
#include <tessera/transfer/optim_state.h>
#include <tessera/transfer/state_dict_type.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "support/ranks.h"

namespace tessera {
namespace {

using testing::on_ranks;

constexpr int kRanks = 4;
constexpr int64_t kBatch = 12; // divides by every world size up to kRanks
constexpr int kSteps = 3; // before and after the move

/// Numbers for one run, the same on all ranks.
class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed * 7919 + 17) {}
  int64_t below(int64_t limit) {
    return static_cast<int64_t>(random_() % static_cast<uint64_t>(limit));
  }
  bool flip(int one_in = 2) {
    return below(one_in) == 0;
  }

 private:
  std::mt19937_64 random_;
};

/// A layer, perhaps in float, frozen, or with another's weight.
struct LayerSpec {
  int64_t in = 1;
  int64_t out = 1;
  bool is_float = false;
  bool is_frozen = false;
  bool has_bias = true;
  int tied_to = -1;
};

struct ModelSpec {
  std::vector<LayerSpec> layers;

  explicit ModelSpec(Dice& dice) {
    const int64_t depth = 2 + dice.below(4);
    int64_t width = 1 + dice.below(9);
    for (int64_t i = 0; i < depth; ++i) {
      LayerSpec layer;
      layer.in = width;
      layer.out = dice.flip(3) ? width : 1 + dice.below(9);
      layer.is_float = dice.flip(5);
      layer.is_frozen = i > 0 && dice.flip(5);
      layer.has_bias = !dice.flip(4);
      for (size_t j = 0; j < layers.size(); ++j) {
        const LayerSpec& other = layers[j];
        if (dice.flip() && other.in == layer.in && other.out == layer.out &&
            other.is_float == layer.is_float && !other.is_frozen &&
            !layer.is_frozen && other.tied_to == -1) {
          layer.tied_to = static_cast<int>(j);
        }
      }
      layers.push_back(layer);
      width = layer.out;
    }
  }

  bool is_tied(size_t i) const {
    return layers[i].tied_to != -1 ||
        std::any_of(layers.begin(), layers.end(), [&](const auto& layer) {
             return layer.tied_to == static_cast<int>(i);
           });
  }

  bool has_float() const {
    return std::any_of(layers.begin(), layers.end(), [](const auto& layer) {
      return layer.is_float;
    });
  }
};

struct Layer : torch::nn::Module {
  Layer(const LayerSpec& spec, const at::Tensor& tied) {
    const auto dtype = spec.is_float ? torch::kFloat : torch::kDouble;
    weight = register_parameter(
        "weight",
        tied.defined() ? tied : torch::randn({spec.out, spec.in}, dtype),
        !spec.is_frozen);
    if (spec.has_bias) {
      bias = register_parameter(
          "bias", torch::randn({spec.out}, dtype), !spec.is_frozen);
    }
    seen = register_buffer("seen", torch::zeros({1}, torch::kLong));
  }

  at::Tensor forward(const at::Tensor& x) {
    seen.add_(1);
    return torch::linear(x.to(weight.scalar_type()), weight, bias)
        .to(torch::kDouble)
        .tanh();
  }

  at::Tensor weight;
  at::Tensor bias;
  at::Tensor seen;
};

struct Net : torch::nn::Module {
  explicit Net(const ModelSpec& spec) {
    for (size_t i = 0; i < spec.layers.size(); ++i) {
      const LayerSpec& layer = spec.layers[i];
      layers.push_back(register_module(
          "layer" + std::to_string(i),
          std::make_shared<Layer>(
              layer,
              layer.tied_to < 0
                  ? at::Tensor()
                  : layers[static_cast<size_t>(layer.tied_to)]->weight)));
    }
    scale = register_parameter("scale", torch::randn({1}, torch::kDouble));
  }

  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) {
      x = layer->forward(x);
    }
    return x * scale;
  }

  std::vector<std::shared_ptr<Layer>> layers;
  at::Tensor scale;
};

enum class Kind {
  Plain,
  FsdpFlat,
  FsdpOrig,
  FullyShardFlat,
  FullyShardDim0,
  Ddp,
  DdpAndZero,
};
constexpr int kNumKinds = 7;

struct Setup {
  Kind kind = Kind::Plain;
  ShardingStrategy strategy = ShardingStrategy::FullShard;
  int ranks = 1;
  std::vector<bool> is_unit; // by layer
  bool operator==(const Setup&) const = default;

  Setup(Dice& dice, const ModelSpec& spec) {
    kind = static_cast<Kind>(dice.below(kNumKinds));
    if (kind == Kind::DdpAndZero && spec.has_float()) {
      kind = Kind::Ddp; // ZeRO needs one dtype
    }
    ranks = kind == Kind::Plain ? 1 : 1 + static_cast<int>(dice.below(kRanks));
    strategy = static_cast<ShardingStrategy>(dice.below(4));
    if (strategy == ShardingStrategy::HybridShard) {
      ranks = kind == Kind::Plain ? 1 : 4; // two copies of two parts
    }
    for (size_t i = 0; i < spec.layers.size(); ++i) {
      is_unit.push_back(dice.flip());
    }
  }

  bool is_sharded() const {
    return kind != Kind::Plain && kind != Kind::Ddp && kind != Kind::DdpAndZero;
  }

  /// FSDP needs units of one dtype, flat ones also all trainable or all frozen.
  bool wraps(const LayerSpec& layer, size_t i) const {
    const bool is_fsdp = kind == Kind::FsdpFlat || kind == Kind::FsdpOrig;
    return is_unit[i] || (is_fsdp && (layer.is_float || layer.is_frozen));
  }

  std::string describe() const {
    static constexpr const char* kKinds[] = {
        "plain",
        "FSDP flat",
        "FSDP orig",
        "fully_shard",
        "fully_shard Dim0",
        "DDP",
        "DDP and ZeRO"};
    return std::string(kKinds[static_cast<int>(kind)]) + " strategy " +
        std::to_string(static_cast<int>(strategy)) + " on " +
        std::to_string(ranks) + " ranks";
  }
};

/// A model with its optimizer on some ranks of the world.
class Trainer {
 public:
  /// `group` has setup.ranks ranks.
  Trainer(
      const ModelSpec& spec,
      const Setup& setup,
      const Group& group,
      const std::vector<bool>& in_second_group, // by layer
      int64_t optimizer,
      uint64_t model_seed)
      : group_(group), is_sharded_(setup.is_sharded()) {
    torch::manual_seed(model_seed);
    model_ = std::make_shared<Net>(spec);
    if (is_sharded_) {
      shard(spec, setup);
    } else if (setup.kind != Kind::Plain) {
      ddp_ = std::make_unique<DistributedDataParallel<Net>>(
          model_, DDPOptions().process_group(group_));
    }
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>());
    groups.emplace_back(std::vector<at::Tensor>());
    for (const auto& [name, tensor] : named_parameters(*model_)) {
      const bool second = name.rfind("layer", 0) == 0 &&
          in_second_group[static_cast<size_t>(name[5] - '0')];
      groups[second ? 1 : 0].params().push_back(tensor);
    }
    std::erase_if(groups, [](const auto& one) { return one.params().empty(); });
    const MakeOptimizer make = maker_of(optimizer);
    if (setup.kind == Kind::DdpAndZero) {
      optim_ = std::make_unique<ZeroRedundancyOptimizer>(
          groups, make, ZeroOptions().process_group(group_));
    } else {
      optim_ = make(groups);
    }
  }

  void train(int first_step) {
    for (int step = first_step; step < first_step + kSteps; ++step) {
      torch::manual_seed(1000 + static_cast<uint64_t>(step));
      const int64_t in = model_->layers.front()->weight.size(1);
      const auto x = torch::randn({kBatch, in}, torch::kDouble);
      const int64_t rows = kBatch / group_.size();
      optim_->zero_grad();
      model_->forward(x.narrow(0, group_.rank() * rows, rows))
          .square()
          .mean()
          .backward();
      optim_->step();
    }
  }

  Net& model() {
    return *model_;
  }
  torch::optim::Optimizer& optim() {
    return *optim_;
  }
  OptimizerRefs optims() {
    return {*optim_};
  }
  const Group& group() const {
    return group_;
  }
  /// Else its ranks are those that have one, which the model does not know.
  bool is_sharded() const {
    return is_sharded_;
  }
  /// The state of a ZeRO optimizer, complete on rank 0. Collective.
  void consolidate() {
    if (auto* zero = dynamic_cast<ZeroRedundancyOptimizer*>(optim_.get())) {
      zero->consolidate_state_dict(0);
    }
  }

 private:
  static MakeOptimizer maker_of(int64_t optimizer) {
    if (optimizer == 0) {
      return optimizer_class<optim::Adam>(
          optim::AdamOptions(0.01).weight_decay(0.1).amsgrad(true));
    }
    if (optimizer == 1) {
      return optimizer_class<optim::AdamW>(optim::AdamWOptions(0.01));
    }
    return optimizer_class<optim::SGD>(
        optim::SGDOptions(0.01).momentum(0.9).nesterov(true));
  }

  void shard(const ModelSpec& spec, const Setup& setup) {
    const bool is_hybrid = setup.strategy == ShardingStrategy::HybridShard;
    const bool is_copied = setup.strategy == ShardingStrategy::NoShard;
    std::optional<Mesh> mesh;
    if (is_hybrid || is_copied) {
      mesh.emplace(
          Mesh(group_, {is_hybrid ? 2 : group_.size(), is_hybrid ? 2 : 1}));
    }
    const auto options =
        FSDPOptions().use_orig_params(setup.kind == Kind::FsdpOrig);
    const auto wrap = [&](const std::shared_ptr<torch::nn::Module>& module) {
      if (setup.kind == Kind::FsdpFlat || setup.kind == Kind::FsdpOrig) {
        auto one = options;
        one.sharding_strategy(setup.strategy);
        if (is_hybrid) {
          one.device_mesh(*mesh);
        } else {
          one.process_group(group_);
        }
        FSDP<torch::nn::Module>(module, one);
      } else {
        auto one = FullyShardOptions().layout(
            setup.kind == Kind::FullyShardFlat ? ShardLayout::Flat
                                               : ShardLayout::Dim0);
        if (mesh) {
          one.mesh(*mesh);
        } else {
          one.group(group_);
        }
        one.reshard_after_forward(
            setup.strategy == ShardingStrategy::FullShard);
        fully_shard(*module, one);
      }
    };
    for (size_t i = 0; i < model_->layers.size(); ++i) {
      if (setup.wraps(spec.layers[i], i)) {
        wrap(model_->layers[i]);
      }
    }
    wrap(model_);
  }

  Group group_;
  bool is_sharded_;
  std::shared_ptr<Net> model_;
  std::unique_ptr<DistributedDataParallel<Net>> ddp_;
  std::unique_ptr<torch::optim::Optimizer> optim_;
};

/// Sends rank 0's dictionary to every rank.
ModelAndOptimizerState broadcast(
    const Group& world,
    const ModelAndOptimizerState& state) {
  const StateDict both{{"model", state.model}, {"optim", state.optimizer}};
  const StateDict got = state_dict_from_bytes(
      world.broadcast_bytes(state_dict_to_bytes(both), 0));
  return {got.at("model").dict(), got.at("optim").dict()};
}

/// From `source` to `target`, which other ranks may have too. A null pointer:
/// not on this rank.
void move_full(const Group& world, Trainer* source, Trainer* target) {
  const auto options =
      StateDictOptions().full_state_dict(true).cpu_offload(true);
  ModelAndOptimizerState state;
  if (source != nullptr) {
    state = get_state_dict(source->model(), source->optims(), options);
  }
  const ModelAndOptimizerState everywhere = broadcast(world, state);
  if (target != nullptr) {
    ASSERT_TRUE(
        world.rank() == 0 || !source || !source->is_sharded() ||
        state.model.empty());
    set_state_dict(
        target->model(),
        target->optims(),
        target->is_sharded() ? state : everywhere,
        StateDictOptions().full_state_dict(true).broadcast_from_rank0(
            target->is_sharded()));
  }
  world.barrier();
}

/// The same by FSDP's own functions, rank 0's dictionary sent to all.
void move_by_fsdp(const Group& world, Trainer* source, Trainer* target) {
  StateDict state;
  if (source != nullptr) {
    source->consolidate();
    const auto full = StateDictOptions().full_state_dict(true);
    state.set("model", get_model_state_dict(source->model(), full));
    if (source->is_sharded() || world.rank() == 0) {
      state.set(
          "optim",
          full_optim_state_dict(
              source->model(),
              source->optim(),
              FullOptimStateOptions().rank0_only(false)));
    }
  }
  const StateDict everywhere = state_dict_from_bytes(
      world.broadcast_bytes(state_dict_to_bytes(state), 0));
  if (target != nullptr) {
    load_state_dict(target->model(), everywhere.at("model").dict());
    optim::load_state_dict(
        target->optim(),
        shard_full_optim_state_dict(
            everywhere.at("optim").dict(),
            target->model(),
            LoadOptimStateOptions().optim(target->optim())));
  }
}

/// Without gathering; both are on the same ranks.
void move_sharded(const Group&, Trainer* source, Trainer* target) {
  if (source != nullptr) {
    const auto state = get_state_dict(source->model(), source->optims());
    set_state_dict(target->model(), target->optims(), state);
  }
}

/// On one level, as Python flattens it, over all ranks' full tensors.
void move_flattened(const Group& world, Trainer* source, Trainer* target) {
  const auto options =
      StateDictOptions().full_state_dict(true).flatten_optimizer_state_dict(
          true);
  StateDict state;
  if (source != nullptr) {
    const auto both =
        get_state_dict(source->model(), source->optims(), options);
    state = StateDict{{"model", both.model}, {"optim", both.optimizer}};
  }
  const StateDict everywhere = state_dict_from_bytes(
      world.broadcast_bytes(state_dict_to_bytes(state), 0));
  if (target != nullptr) {
    set_state_dict(
        target->model(),
        target->optims(),
        {everywhere.at("model").dict(), everywhere.at("optim").dict()},
        options);
  }
}

StateDict full_model(Trainer& trainer) {
  return get_model_state_dict(
      trainer.model(), StateDictOptions().full_state_dict(true));
}

StateDict full_state(Trainer& trainer) {
  const auto state = get_state_dict(
      trainer.model(),
      trainer.optims(),
      StateDictOptions().full_state_dict(true));
  return {
      {"model", state.model.clone()},
      {"state", state.optimizer.at("state").clone()}};
}

void run(const Group& world, uint64_t number) {
  Dice dice(number);
  const ModelSpec spec(dice);
  const Setup from(dice, spec);
  const Setup to = dice.flip(8) ? from : Setup(dice, spec);
  const int64_t optimizer = dice.below(3);
  const bool same_ranks = from.ranks == to.ranks;
  const int64_t way = dice.below(same_ranks ? 4 : 3);
  SCOPED_TRACE(
      "run " + std::to_string(number) + ": " + from.describe() + " to " +
      to.describe() + ", optimizer " + std::to_string(optimizer) + ", way " +
      std::to_string(way));
  const auto group_of = [&](int ranks) {
    std::vector<int> members;
    for (int rank = 0; rank < ranks; ++rank) {
      members.push_back(rank);
    }
    return world.subgroup(members);
  };
  const auto source_group = group_of(from.ranks);
  const auto target_group = group_of(to.ranks);
  std::unique_ptr<Trainer> source;
  std::unique_ptr<Trainer> target;
  // Flat parameters are in one group as a whole.
  std::vector<bool> in_second_group;
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const LayerSpec& layer = spec.layers[i];
    in_second_group.push_back(
        dice.flip() && !spec.is_tied(i) && from.wraps(layer, i) &&
        to.wraps(layer, i));
  }
  if (source_group) {
    source = std::make_unique<Trainer>(
        spec, from, *source_group, in_second_group, optimizer, 1);
    source->train(0);
  }
  if (target_group) { // other values, and perhaps state of its own
    target = std::make_unique<Trainer>(
        spec, to, *target_group, in_second_group, optimizer, 2);
    if (dice.flip()) {
      target->train(0);
      target->optim().zero_grad();
    }
  }
  using Move = void (*)(const Group&, Trainer*, Trainer*);
  static constexpr Move kMoves[] = {
      move_full, move_by_fsdp, move_flattened, move_sharded};
  kMoves[way](world, source.get(), target.get());

  // What moved is the same, to the bit.
  StateDict moved;
  if (source) {
    moved = full_state(*source);
  }
  moved = state_dict_from_bytes(
      world.broadcast_bytes(state_dict_to_bytes(moved), 0));
  if (target) {
    EXPECT_EQ(diff_state_dicts(full_state(*target), moved), "");
  }

  StateDict expected;
  if (source) {
    source->train(kSteps);
    expected = full_model(*source);
  }
  expected = state_dict_from_bytes(
      world.broadcast_bytes(state_dict_to_bytes(expected), 0));
  if (target) {
    target->train(kSteps);
    const bool same_arithmetic = from == to;
    const double tolerance = same_arithmetic ? 0
        : spec.has_float()                   ? 1e-4
                                             : 1e-9;
    EXPECT_EQ(
        diff_state_dicts(full_model(*target), expected, {tolerance, tolerance}),
        "");
  }
}

TEST(AnyToAnyTest, TrainingGoesOnAsIfNothingHadMoved) {
  uint64_t begin = 0;
  uint64_t end = 60;
  if (const char* range = std::getenv("TESSERA_ANY_TO_ANY")) {
    char* colon = nullptr;
    begin = std::strtoull(range, &colon, 10);
    ASSERT_EQ(*colon, ':') << "TESSERA_ANY_TO_ANY is BEGIN:END";
    end = std::strtoull(colon + 1, nullptr, 10);
  }
  testing::RanksOptions options{.size = kRanks};
  options.test_timeout =
      std::chrono::seconds(60 + static_cast<int64_t>(end - begin));
  on_ranks(options, [&](const Group& world) {
    for (uint64_t number = begin; number < end; ++number) {
      run(world, number);
      if (::testing::Test::HasFailure()) {
        break; // the others cannot continue without this rank
      }
    }
  });
}

} // namespace
} // namespace tessera
