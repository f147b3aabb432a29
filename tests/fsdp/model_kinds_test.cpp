// Models as users write them: sharded or data parallel, they train as in a
// single process.
//
// Every rank gets the same data, so that the average of the gradients is what
// one process computes, whatever the model does with its batch.
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/optim/adamw.h>

#include "support/device.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using tessera::testing::on_ranks;
using tessera::testing::RanksOptions;
using tessera::testing::test_device;
using torch::nn::Module;

constexpr int kSteps = 3;

/// A model and how to get a loss out of it.
struct Subject {
  std::shared_ptr<Module> module;
  std::function<at::Tensor(int step)> loss;
  /// Modules that become units of their own, inner ones first.
  std::vector<std::shared_ptr<Module>> units;
};

using MakeSubject = Subject (*)();

at::Tensor input(at::IntArrayRef sizes, int step) {
  torch::manual_seed(50 + step);
  return torch::randn(sizes, at::kDouble).to(test_device());
}

struct Pile : Module {
  std::vector<torch::nn::Linear> layers;
  explicit Pile(int count) {
    for (int i = 0; i < count; ++i) {
      layers.push_back(register_module(
          "layer" + std::to_string(i), torch::nn::Linear(5, 5)));
    }
  }
};

std::vector<std::shared_ptr<Module>> children_of(const Module& module) {
  return module.children();
}

Subject convolutions() {
  torch::nn::Sequential model(
      torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3).padding(1)),
      torch::nn::BatchNorm2d(4),
      torch::nn::ReLU(),
      torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 6, 3).groups(2)),
      torch::nn::GroupNorm(torch::nn::GroupNormOptions(2, 6)));
  model->to(at::kDouble);
  return {
      model.ptr(),
      [model](int step) mutable {
        return model->forward(input({2, 3, 6, 6}, step)).square().mean();
      },
      {model[0], model[3]}};
}

Subject recurrent() {
  struct Net : Module {
    torch::nn::LSTM lstm = register_module(
        "lstm",
        torch::nn::LSTM(
            torch::nn::LSTMOptions(4, 5).num_layers(2).bidirectional(true)));
    torch::nn::GRU gru = register_module("gru", torch::nn::GRU(10, 3));
  };
  auto net = std::make_shared<Net>();
  net->to(at::kDouble);
  return {
      net,
      [net](int step) {
        const auto [hidden, state] = net->lstm(input({6, 2, 4}, step));
        return std::get<0>(net->gru(hidden)).square().mean();
      },
      children_of(*net)};
}

Subject called_several_times() {
  auto pile = std::make_shared<Pile>(2);
  pile->to(at::kDouble);
  return {
      pile,
      [pile](int step) {
        auto x = input({3, 5}, step);
        for (int i = 0; i < 3; ++i) {
          x = torch::tanh(pile->layers[0](x));
        }
        return pile->layers[1](pile->layers[0](x)).square().mean();
      },
      children_of(*pile)};
}

Subject branches_by_step() {
  auto pile = std::make_shared<Pile>(4);
  pile->to(at::kDouble);
  return {
      pile,
      [pile](int step) { // layer 3 is never used
        const auto x = pile->layers[0](input({3, 5}, step));
        return pile->layers[step % 2 == 0 ? 1 : 2](x).square().mean();
      },
      children_of(*pile)};
}

Subject partly_frozen() {
  auto pile = std::make_shared<Pile>(3);
  pile->to(at::kDouble);
  pile->layers[0]->weight.set_requires_grad(false); // part of a unit
  for (auto& parameter : pile->layers[1]->parameters()) { // a whole one
    parameter.set_requires_grad(false);
  }
  return {
      pile,
      [pile](int step) {
        return pile
            ->layers[2](pile->layers[1](pile->layers[0](input({3, 5}, step))))
            .square()
            .mean();
      },
      children_of(*pile)};
}

Subject mixed_dtypes() {
  struct Net : Module {
    at::Tensor fine =
        register_parameter("fine", torch::randn({7}, at::kDouble));
    at::Tensor coarse =
        register_parameter("coarse", torch::randn({7}, at::kFloat));
    at::Tensor scalar =
        register_parameter("scalar", torch::randn({}, at::kDouble));
  };
  auto net = std::make_shared<Net>();
  return {
      net,
      [net](int step) {
        const auto x = input({7}, step);
        return (x * net->fine * net->scalar + net->coarse).square().mean();
      },
      {}};
}

Subject one_operator_two_units() {
  auto pile = std::make_shared<Pile>(2);
  pile->to(at::kDouble);
  return {
      pile,
      [pile](int step) {
        const auto both = torch::cat(
            {pile->layers[0]->weight, pile->layers[1]->weight * 2}, 0);
        return torch::linear(input({3, 5}, step), both).square().mean() +
            (pile->layers[0]->bias * pile->layers[1]->bias).sum();
      },
      children_of(*pile)};
}

Subject sparse_embedding() {
  struct Net : Module {
    torch::nn::Embedding table = register_module(
        "table",
        torch::nn::Embedding(torch::nn::EmbeddingOptions(9, 4).sparse(true)));
    torch::nn::Linear head = register_module("head", torch::nn::Linear(4, 2));
  };
  auto net = std::make_shared<Net>();
  net->to(at::kDouble);
  return {
      net,
      [net](int step) {
        torch::manual_seed(step);
        const auto rows =
            torch::randint(0, 9, {6}, at::kLong).to(test_device());
        return net->head(net->table(rows)).square().mean();
      },
      {net->head.ptr()}};
}

Subject attention() {
  torch::nn::TransformerEncoderLayer layer(
      torch::nn::TransformerEncoderLayerOptions(8, 2)
          .dim_feedforward(12)
          .dropout(0));
  layer->to(at::kDouble);
  return {
      layer.ptr(),
      [layer](int step) mutable {
        return layer->forward(input({4, 2, 8}, step)).square().mean();
      },
      {layer->linear1.ptr(), layer->self_attn.ptr()}};
}

struct Kind {
  const char* name;
  MakeSubject make;
};

const Kind kKinds[] = {
    {"Convolutions", convolutions},
    {"Recurrent", recurrent},
    {"CalledSeveralTimes", called_several_times},
    {"BranchesByStep", branches_by_step},
    {"PartlyFrozen", partly_frozen},
    {"MixedDtypes", mixed_dtypes},
    {"OneOperatorTwoUnits", one_operator_two_units},
    {"SparseEmbedding", sparse_embedding},
    {"Attention", attention}};

Subject make(const Kind& kind) {
  at::globalContext().setDeterministicCuDNN(true); // bits are compared
  torch::manual_seed(1);
  Subject subject = kind.make();
  subject.module->to(test_device());
  return subject;
}

/// LibTorch's own AdamW takes no sparse gradients either: dense ones.
void train(Subject& subject, const std::vector<at::Tensor>& parameters) {
  optim::AdamW optimizer(parameters, 1e-2);
  for (int step = 0; step < kSteps; ++step) {
    subject.loss(step).backward();
    for (const at::Tensor& parameter : parameters) {
      if (parameter.grad().defined() && parameter.grad().is_sparse()) {
        parameter.mutable_grad() = parameter.grad().to_dense();
      }
    }
    optimizer.step();
    for (const at::Tensor& parameter : parameters) {
      parameter.mutable_grad().reset();
    }
  }
}

/// Equal bit by bit on one rank, and elsewhere if `is_exact`.
void expect_same(
    const Module& trained,
    const Module& plain,
    int num_ranks,
    bool is_exact = false) {
  torch::NoGradGuard no_grad;
  const auto expected = plain.named_parameters();
  for (const auto& item : trained.named_parameters()) {
    const at::Tensor difference = item.value() - expected[item.key()];
    const double worst =
        difference.numel() == 0 ? 0 : difference.abs().max().item<double>();
    const bool is_float = item.value().scalar_type() == at::kFloat;
    EXPECT_LE(
        worst,
        num_ranks == 1 || is_exact ? 0
            : is_float             ? 1e-5
                                   : 1e-9)
        << item.key();
  }
  for (const auto& item : trained.named_buffers()) {
    EXPECT_TRUE(
        torch::allclose(item.value(), plain.named_buffers()[item.key()]))
        << item.key();
  }
}

/// How a subject is sharded.
struct Way {
  const char* name;
  int size;
  std::string backend;
  void (*shard)(Subject& subject);
};

void shard(Subject& subject, const FullyShardOptions& options) {
  for (const auto& unit : subject.units) {
    fully_shard(*unit, options);
  }
  fully_shard(*subject.module, options);
}

template <ShardLayout layout>
void shard_by_layout(Subject& subject) {
  shard(subject, FullyShardOptions().layout(layout));
}

/// Gathers run ahead, and reductions behind, as far as they go.
void shard_with_overlap(Subject& subject) {
  shard(subject, FullyShardOptions().overlap_bytes(int64_t{1} << 40));
}

/// One flat parameter per unit allows neither several dtypes nor frozen parts.
void shard_by_handle(Subject& subject) {
  const auto options = FSDPOptions().use_orig_params(true);
  for (const auto& unit : subject.units) {
    FSDP<Module>(unit, options);
  }
  FSDP<Module>(subject.module, options);
}

const Way kWays[] = {
    {"Flat1", 1, "auto", shard_by_layout<ShardLayout::Flat>},
    {"Flat2", 2, "shm", shard_by_layout<ShardLayout::Flat>},
    {"Flat3", 3, "shm", shard_by_layout<ShardLayout::Flat>},
    {"Flat4", 4, "shm", shard_by_layout<ShardLayout::Flat>},
    {"FlatGloo2", 2, "gloo", shard_by_layout<ShardLayout::Flat>},
    {"Dim01", 1, "auto", shard_by_layout<ShardLayout::Dim0>},
    {"Dim02", 2, "shm", shard_by_layout<ShardLayout::Dim0>},
    {"Dim03", 3, "shm", shard_by_layout<ShardLayout::Dim0>},
    {"Dim04", 4, "shm", shard_by_layout<ShardLayout::Dim0>},
    {"Dim0Gloo2", 2, "gloo", shard_by_layout<ShardLayout::Dim0>},
    {"Dim0Gloo4", 4, "gloo", shard_by_layout<ShardLayout::Dim0>},
    {"Overlap2", 2, "shm", shard_with_overlap},
    {"Overlap4", 4, "gloo", shard_with_overlap},
    {"Handle2", 2, "shm", shard_by_handle}};

class ModelKindsTest : public ::testing::TestWithParam<std::tuple<Kind, Way>> {
};

TEST_P(ModelKindsTest, TrainingMatchesSingleProcess) {
  const auto& [kind, way] = GetParam();
  if (way.shard == shard_by_handle && kind.make == mixed_dtypes) {
    on_ranks(way.size, [](const Group&) { // refused, as in Python
      Subject subject = mixed_dtypes();
      EXPECT_THROW(shard_by_handle(subject), c10::Error);
    });
    return;
  }
  const RanksOptions ranks{.size = way.size, .backend = way.backend};
  on_ranks(ranks, [kind = kind, way = way](const Group& world) {
    Subject plain = make(kind);
    train(plain, plain.module->parameters());

    Subject sharded = make(kind);
    way.shard(sharded);
    train(sharded, parameters(*sharded.module));

    expect_same(*sharded.module, *plain.module, world.size());
  });
}

INSTANTIATE_TEST_SUITE_P(
    Kinds,
    ModelKindsTest,
    ::testing::Combine(::testing::ValuesIn(kKinds), ::testing::ValuesIn(kWays)),
    [](const auto& test) {
      return std::string(std::get<0>(test.param).name) +
          std::get<1>(test.param).name;
    });

class DdpModelKindsTest : public ::testing::TestWithParam<Kind> {};

/// The average of two or four equal gradients is that gradient, bit by bit.
TEST_P(DdpModelKindsTest, TrainingMatchesSingleProcess) {
  const Kind& kind = GetParam();
  for (const bool bucket_view : {false, true}) {
    for (const RanksOptions& ranks : std::vector<RanksOptions>{
             {.size = 1},
             {.size = 2},
             {.size = 3},
             {.size = 4},
             {.size = 2, .backend = "gloo"}}) {
      on_ranks(ranks, [&](const Group& world) {
        Subject plain = make(kind);
        train(plain, plain.module->parameters());

        Subject copy = make(kind);
        const DistributedDataParallel<Module> ddp(
            copy.module,
            DDPOptions().find_unused_parameters(true).gradient_as_bucket_view(
                bucket_view));
        train(copy, parameters(*copy.module));
        expect_same(
            *copy.module, *plain.module, world.size(), world.size() != 3);
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds,
    DdpModelKindsTest,
    ::testing::ValuesIn(kKinds),
    [](const auto& test) { return std::string(test.param.name); });

} // namespace
} // namespace tessera
