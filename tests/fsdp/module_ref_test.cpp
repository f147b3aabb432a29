// Every form in which a program may have a module, given to the functions that
// take one.
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/module_ref.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/sgd.h>
#include <tessera/recompute/recompute.h>
#include <tessera/train/training_state.h>
#include <tessera/transfer/distributed_state_dict.h>
#include <tessera/transfer/model_state.h>
#include <tessera/transfer/state_dict_type.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <type_traits>

#include "fsdp/models.h"
#include "fsdp/training.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::nn::AnyModule;
using torch::nn::Module;
using torch::nn::Sequential;

template <class T>
constexpr bool kConverts = std::is_convertible_v<T, ModuleRef>;

static_assert(kConverts<Module&>);
static_assert(kConverts<BlockImpl&>);
static_assert(kConverts<Block&>);
static_assert(kConverts<Block>);
static_assert(kConverts<Sequential&>);
static_assert(kConverts<AnyModule&>);
static_assert(kConverts<const AnyModule&>);
static_assert(kConverts<const std::shared_ptr<BlockImpl>&>);
static_assert(kConverts<const std::shared_ptr<Module>&>);
static_assert(kConverts<const FSDP<BlockImpl>&>);
static_assert(kConverts<const DistributedDataParallel<BlockImpl>&>);

static_assert(!kConverts<const Module&>);
static_assert(!kConverts<const BlockImpl&>);
static_assert(!kConverts<const Block&>);
static_assert(!kConverts<const Sequential&>);
static_assert(!kConverts<const std::shared_ptr<const Module>&>);
static_assert(!kConverts<std::shared_ptr<int>>);
static_assert(!kConverts<std::nullptr_t>);
static_assert(!kConverts<at::Tensor>);

TEST(ModuleRefTest, EveryFormIsTheSameModule) {
  Block block(kWidth);
  Module* const expected = block.ptr().get();
  const auto same = [&](ModuleRef module) { return &*module == expected; };
  const std::shared_ptr<BlockImpl> typed = block.ptr();
  const std::shared_ptr<Module> pointer = typed;
  const AnyModule any(block);
  EXPECT_TRUE(same(*block));
  EXPECT_TRUE(same(block));
  EXPECT_TRUE(same(Block(typed)));
  EXPECT_TRUE(same(typed));
  EXPECT_TRUE(same(pointer));
  EXPECT_TRUE(same(any));
  Sequential sequential(block, torch::nn::ReLU());
  EXPECT_TRUE(same(*sequential->begin()));
  torch::nn::ModuleList list(block);
  EXPECT_TRUE(same(*list->begin()));
}

TEST(ModuleRefTest, RejectsWhatIsEmptyByItsClass) {
  const auto error = [](auto holder) {
    return error_of([&] { ModuleRef{holder}; });
  };
  const auto names_block =
      AllOf(HasSubstr("BlockImpl is empty"), HasSubstr("register_module"));
  EXPECT_THAT(error(Block(nullptr)), names_block);
  EXPECT_THAT(error(std::shared_ptr<BlockImpl>()), names_block);
  EXPECT_THAT(error(AnyModule()), HasSubstr("AnyModule is empty"));
  EXPECT_THROW(fully_shard(Block(nullptr)), c10::ValueError);
  const auto x = torch::ones({1, kWidth});
  EXPECT_THROW(recompute(Block(nullptr), x), c10::ValueError);
  EXPECT_THROW(recompute(std::shared_ptr<BlockImpl>(), x), c10::ValueError);
  EXPECT_THROW(recompute(AnyModule(), x), c10::ValueError);
}

TEST(ModuleRefTest, AModelShardedByItsHoldersTrains) {
  on_ranks(2, [](const Group& world) {
    torch::manual_seed(0);
    Sequential model{Block(kWidth), Block(kWidth)};
    for (auto& element : *model) {
      fully_shard(element);
    }
    fully_shard(model);
    optim::SGD optimizer(parameters(model), 0.1);
    EXPECT_EQ(named_parameters(model).size(), 12);
    EXPECT_TRUE(named_buffers(model).empty());
    EXPECT_GE(fsdp_units(model).size(), 2);

    const auto input = torch::ones({2, kWidth}) * (world.rank() + 1);
    {
      NoSync no_sync(model);
      model->forward(input).sum().backward();
    }
    set_requires_gradient_sync(model, true);
    set_requires_all_reduce(model, true);
    model->forward(input).sum().backward();
    EXPECT_GT(clip_grad_norm_(model, 1.0).item<double>(), 0);
    optimizer.step();
    optimizer.zero_grad();

    unshard(model);
    reshard(model);
    summon_full_params(model).close();
    recover(model);
  });
}

TEST(ModuleRefTest, StateIsTakenFromHoldersAndHandles) {
  on_ranks(2, [](const Group&) {
    torch::manual_seed(0);
    Block block(kWidth);
    FSDP model{block, FSDPOptions().use_orig_params(true)};
    optim::AdamW optimizer(parameters(model), 0.1);
    EXPECT_EQ(state_dict(model), state_dict(block));
    load_state_dict(block, state_dict(model));
    const auto state = get_state_dict(block, {optimizer});
    EXPECT_EQ(state.model, get_model_state_dict(model));
    set_state_dict(block, {optimizer}, state);
    EXPECT_EQ(
        get_model_state_dict(
            block,
            StateDictOptions().keep_submodule_prefixes(false),
            {block->up})
            .size(),
        2);
    const StateDictTypeGuard guard(block, StateDictType::ShardedStateDict);
    EXPECT_EQ(get_state_dict_type(model).type, StateDictType::ShardedStateDict);
    TrainingState training(block, {optimizer});
    EXPECT_TRUE(training.state_dict().contains("model"));
  });
}

TEST(ModuleRefTest, RecomputeTakesEveryForm) {
  torch::manual_seed(0);
  Block block(kWidth);
  Sequential sequential(block, torch::nn::ReLU());
  const auto x = torch::ones({2, kWidth});
  const auto gradient_of = [&](const at::Tensor& output) {
    block->zero_grad();
    output.sum().backward();
    return block->up->weight.grad().clone();
  };
  const auto plain = gradient_of(block->forward(x));
  EXPECT_TRUE(torch::equal(gradient_of(recompute(block, x)), plain));
  EXPECT_TRUE(torch::equal(gradient_of(recompute(block.ptr(), x)), plain));
  EXPECT_TRUE(torch::equal(gradient_of(recompute(AnyModule(block), x)), plain));
  EXPECT_TRUE(torch::equal(
      gradient_of(recompute(sequential, x)),
      gradient_of(sequential->forward(x))));
}

} // namespace
} // namespace tessera
